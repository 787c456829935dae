"""The tour: a presentation in six steps that needs neither a model nor a network.

Its turns are recordings: a model really generated them, and the files say which model, when, and
with which weights. `python -m compeer_core.tour record` records them again.

```text
assets/tour/plan.toml      what is recorded: situations, training stages, the seed
assets/tour/*.json         the recordings, one per situation and stage
assets/tour/notes.toml     a reader's comments (a language model's) on the recorded steps
assets/tour/figures.toml   which measured numbers the tour shows, and which of the paper's
```
"""
