"""Personality-based conversation rewriting (COMPEER, "Personality-based Conversation Rewriting").

The paper's route, one module per step:

- `traits`: DISC traits of the seeker and the supporter of each dialogue, described in a sentence
  or two;
- `clusters`: K-Means over embeddings of the descriptions, K by the elbow of the squared errors;
- `rewriting`: rewrites each row in the manner of a persona of the same cluster, with the two variants
  that the paper compares it with, and a final filter (`drift`).

Without a generator, the published rules of `manner` replace the language model.
"""
