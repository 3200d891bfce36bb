"""Frozen dataclasses that all other packages share: configuration, workload, search space, study.

A configuration is one choice for every technique; a workload says what is trained; a search space
says which configurations may be tried; a study is all of these with a device and a memory cap; a
result holds the record of each trial. Does not import torch.
"""
