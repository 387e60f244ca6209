"""Text in, packed rows out: sources, tokens, packing, and a stream whose place can be kept and taken up again."""

from runtime.data.corpus import byte_batches, corpus_words, standard_library_sources

__all__ = ["byte_batches", "corpus_words", "standard_library_sources"]
