"""A small synthetic language, so that every experiment runs anywhere: its words, documents and prompt forms.

    kvexp testbed sample          a document, what is asked about it, and the answers
    kvexp train-testbed                train the models that come with kvexp (make testbed)
    python -m experiments.testbed           are they good enough to measure with?

A document is a list of sentences about one topic. Among filler stand facts, "city alice north ford .": some numbered
("first city alice north ford !"), which is what a summary has to tell, some stated anew later with another value ("now
city alice east pool ."); and the filler names the same people and values without stating anything. Each (name,
attribute, value) belongs to one split, so that nothing asked in a test was ever seen in training. Four small models
were trained on it, one per layout of the papers' models, on documents of up to 560 tokens with up to 20 facts, ten of
them numbered, with up to 16 questions and 4 recalls each: tasks refuse forms that were never trained, but not lengths.

What carries over to real models, and what does not:

- Whether a method runs as its paper says: what it keeps and forgets, its bytes, its behaviour under beams, batches,
  grouped heads, ALiBi or learned positions. The code is the same.
- Mechanisms: a fact whose tokens leave the cache in all heads that copy it is lost, and a question asked after the
  eviction is harder than one the method could read. Both can be followed here token by token.
- The order of methods, only as far as their reasons carry over. These models attend by copying: nearly all of the mass
  of a head that matters lies on few tokens, and there is no world knowledge to fall back on when a fact is evicted.
  Real text is redundant, a lost word is often guessed, and attention is spread wider, so losses here are steeper.
- Not the percentages. No number from the testbed may be quoted as one about a 7B model, nor a kv_ratio as a
  recommendation: prompts here are hundreds of tokens, and a fixed number of protected tokens weighs more in them.
"""

LANGUAGE = 1  # raised when the same seed makes another text
