"""A published checkpoint against the model: what each parameter is made of, what is missing, what is left over."""
