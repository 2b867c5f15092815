"""nano-K3's own four suites: seeded generators, the character tokenizer, and the recipe that trains the shipped checkpoint on them."""
