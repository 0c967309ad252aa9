"""The probe trainer and the pretrainer."""
