"""The tour: what a person sees who has six steps' time and neither a model nor a network.

Its turns are recordings: a model really wrote them, and the files say which one, when, and from what
weights. `python -m compeer_core.tour record` makes them again.

```text
assets/tour/plan.toml      what is recorded: situations, stages of training, the seed
assets/tour/*.json         the recordings, one for each situation and stage
assets/tour/notes.toml     what a person says about the recorded steps
assets/tour/figures.toml   which measured numbers the tour shows, and which of the paper's
```
"""
