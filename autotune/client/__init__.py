"""The client of `autotune serve`: submit searches from anywhere, watch them, read their studies.

    import autotune

    client = autotune.Client("http://127.0.0.1:8321", token="...")
    search = client.submit(max_mem="8GiB", name="my-study")
    for event in client.watch(search.id):
        print(event.kind, event.data)
    print(client.show("my-study").pick.reason)

`client.py` has the calls, `connection.py` the requests, their repetition and their errors.
"""
