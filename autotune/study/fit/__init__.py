"""How large a model can be trained under a cap: by prediction and bisection, confirmed by one real trial."""
