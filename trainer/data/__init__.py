"""Documents to train on and to be asked: generated families, conversations, cohorts, the tokenizer."""
