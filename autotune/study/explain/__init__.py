"""Why a configuration needs the memory that it needs, by predictions of it and of changes to it."""
