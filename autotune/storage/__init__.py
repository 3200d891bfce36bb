"""The studies database: what was asked, which worker tries what, and every result.

No row leaves this room.
"""
