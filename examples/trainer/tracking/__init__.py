"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, each by its own library.

    Log.write -> TensorBoard                            at once
              -> Journal (SAVE/tracked.jsonl) -> Follower -> WeightsAndBiases
                                              -> Follower -> MLflow

A run that is stopped and resumed has one history, without gaps and without doubles. The journal has every step up to
the checkpoint that is resumed from, and each tracker says how far its own history goes: a follower sends what lies
between, and steps that are repeated are not sent again. Nothing that a tracker does or fails to do holds up training.
"""
