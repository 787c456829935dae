"""The tour: a presentation in six slides that needs neither a model nor a network.

Its turns are recordings: a model really generated them, and the files say which model, when, and
with which weights. `python -m compeer_core.tour record STAGE=MODEL` records a stage, `record` judges all again.

```text
assets/tour/plan.toml      what is recorded: situations, editions of the model, the seed
assets/tour/*.json         the recordings, one per situation and stage
assets/tour/notes.toml     a reader's comments (a language model's) on the recorded steps
assets/tour/figures.toml   which measured numbers the tour shows, and which of the paper's
```
"""
