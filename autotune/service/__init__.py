"""The HTTP interface and the page over the same study code, without torch in this process.

`application` puts it together, `gate` decides who gets in, `routes` answers under /api/v1.
"""
