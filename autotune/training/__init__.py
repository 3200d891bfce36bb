"""Training one configuration in this process: the step, the trainer that measures it, speed and parity.

This module stays free of torch, because `import autotune` needs `training.script.interface`.
"""
