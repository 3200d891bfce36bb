"""The process of a search that never comes to it, as where its imports take long."""

import time

if __name__ == "__main__":
    time.sleep(3600)
