"""The tour: a demonstration in six steps that needs neither a model nor a network.

Its turns are recordings of real models; the files name the model, the date and the weights. Reproduce:
`python -m compeer_core.tour record`.

```text
assets/tour/plan.toml      what to record: situations, stages of training, the seed
assets/tour/*.json         the recordings, one per situation and stage
assets/tour/notes.toml     a person's comments on the recorded steps
assets/tour/figures.toml   the measured numbers of the tour, and those of the paper
```
"""
