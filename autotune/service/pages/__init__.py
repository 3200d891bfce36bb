"""The pages of the service: rendered on the server, kept up to date by its events.

`contexts` computes what a page shows, the templates say how, `routes` says where. Scripts change
numbers in place and ask for parts of a page again; they are plain modules, without a build step.
"""
