"""The parts of `scripts/train_mixtral.py`: a Mixtral trained end to end on `moe_ep`."""
