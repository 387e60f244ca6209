"""Coverage of the parser and the twin over every language model class that transformers maps."""
