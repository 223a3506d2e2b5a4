"""Model families: a config becomes a ModelSpec, and each matrix finds its checkpoint tensors."""
