"""The service that runs training jobs: enrols devices, hands out tasks, aggregates what they send back."""
