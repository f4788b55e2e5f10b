"""Knowledge distillation.

`losses/` contains the losses, `optimizer/` the optimiser, `training/` the training loop with its
data, schedules and checkpoints, and `run/` the implementation of `cukit distill`. Each package
imports only those listed before it.
"""

from cukit.distill.losses.attention import (
    DistillationAttention,
    distillation_attention,
    distillation_attention_backward,
    relation_kl,
)
from cukit.distill.losses.cross_entropy import cross_entropy, cross_entropy_backward
from cukit.distill.losses.distillation_loss import distillation_loss
from cukit.distill.losses.kl_divergence import kl_divergence, kl_divergence_backward
from cukit.distill.losses.linear_cross_entropy import LinearCrossEntropyResult, linear_cross_entropy
from cukit.distill.losses.linear_distillation_loss import linear_distillation_loss
from cukit.distill.losses.linear_kl_divergence import linear_kl_divergence
from cukit.distill.losses.linear_topk_distillation_loss import (
    linear_sampled_distillation_loss,
    linear_topk_distillation_loss,
)
from cukit.distill.losses.sampled_distillation_loss import sampled_distillation_loss
from cukit.distill.losses.score_mse import attention_score_mse
from cukit.distill.losses.topk_distillation_loss import teacher_top_k, topk_distillation_loss
from cukit.distill.losses.vocabulary_parallel import (
    VocabularyShard,
    vocabulary_parallel_cross_entropy,
    vocabulary_parallel_distillation_loss,
)
from cukit.distill.optimizer.adamw import AdamWState, adamw
from cukit.distill.optimizer.ema_update import ema_update
from cukit.distill.optimizer.global_norm import clip_scale, global_norm
from cukit.distill.training.callbacks import Checkpoints, Progress, stop_on_request
from cukit.distill.training.checkpoint import restore_checkpoint, save_checkpoint
from cukit.distill.training.data import (
    BatchSource,
    Corpus,
    Windows,
    read_corpus,
    validation_batches,
)
from cukit.distill.training.distiller import Distiller, LanguageModelling, Objective
from cukit.distill.training.evaluation import Evaluation, evaluate
from cukit.distill.training.exponential_average import ExponentialAverage
from cukit.distill.training.offline import OfflineBatches, SignalWriter, record_teacher
from cukit.distill.training.schedule import (
    Constant,
    Cosine,
    Linear,
    Schedule,
    WarmupCosine,
    WarmupDecay,
)
from cukit.distill.training.signals import OfflineTeacher, TeacherSignals
from cukit.distill.training.terms import (
    AttentionTerm,
    HiddenStateTerm,
    StateTerm,
    evenly_spaced_map,
)
from cukit.distill.training.trainer import StepStatistics, Trainer
from cukit.reference.losses import LinearKlResult

__all__ = [
    "AdamWState",
    "AttentionTerm",
    "BatchSource",
    "Checkpoints",
    "Constant",
    "Corpus",
    "Cosine",
    "DistillationAttention",
    "Distiller",
    "Evaluation",
    "ExponentialAverage",
    "HiddenStateTerm",
    "LanguageModelling",
    "Linear",
    "LinearCrossEntropyResult",
    "LinearKlResult",
    "Objective",
    "OfflineBatches",
    "OfflineTeacher",
    "Progress",
    "Schedule",
    "SignalWriter",
    "StateTerm",
    "StepStatistics",
    "TeacherSignals",
    "Trainer",
    "VocabularyShard",
    "WarmupCosine",
    "WarmupDecay",
    "Windows",
    "adamw",
    "attention_score_mse",
    "clip_scale",
    "cross_entropy",
    "cross_entropy_backward",
    "distillation_attention",
    "distillation_attention_backward",
    "distillation_loss",
    "ema_update",
    "evaluate",
    "evenly_spaced_map",
    "global_norm",
    "kl_divergence",
    "kl_divergence_backward",
    "linear_cross_entropy",
    "linear_distillation_loss",
    "linear_kl_divergence",
    "linear_sampled_distillation_loss",
    "linear_topk_distillation_loss",
    "read_corpus",
    "record_teacher",
    "relation_kl",
    "restore_checkpoint",
    "sampled_distillation_loss",
    "save_checkpoint",
    "stop_on_request",
    "teacher_top_k",
    "topk_distillation_loss",
    "validation_batches",
    "vocabulary_parallel_cross_entropy",
    "vocabulary_parallel_distillation_loss",
]
