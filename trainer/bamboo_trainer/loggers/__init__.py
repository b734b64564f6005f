"""Writers of a job's history to other systems. docs/history.md is the introduction."""

from bamboo_trainer.loggers.interface import Logger, LoggerFacts, MakeLogger
from bamboo_trainer.loggers.mlflow import mlflow
from bamboo_trainer.loggers.tensorboard import tensorboard
from bamboo_trainer.loggers.wandb import wandb

__all__ = ["Logger", "LoggerFacts", "MakeLogger", "mlflow", "tensorboard", "wandb"]
