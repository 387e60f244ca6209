"""An analytic model of the time of a training step, routing included, checked against published runs. Free of torch."""
