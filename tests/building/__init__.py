"""Makes what tests look at: records, studies, views, reports, and a PostgreSQL server."""
