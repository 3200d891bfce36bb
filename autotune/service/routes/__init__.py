"""The routes of the interface, a module for each subject."""
