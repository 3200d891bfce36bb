"""The report of a study: one HTML page to send to a colleague.

`contents` computes everything on the page, `page` renders it.
"""
