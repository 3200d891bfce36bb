"""The vocabulary: plain, frozen values that every room shares and that cross every border.

Loads no torch.

A configuration is one choice for every technique; a workload says what is trained; a search space
says which configurations may be tried; a study is all of that with a device and a cap; a result
holds the record of each trial.
"""
