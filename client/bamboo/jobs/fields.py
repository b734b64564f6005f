"""The fields of a manifest, for editors and type checkers. They are named as in YAML; docs/api.md says the same.

Made by `make docs` from crds/bamboojob.yaml; change the types in core/bamboo_core/job/ instead.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required, TypedDict


class InitialFromFields(TypedDict, total=False):
    """The weights that training begins with. A job that goes on from a checkpoint of its own does not look at them."""

    url: str
    """A folder that training has left (weights), a folder with model.safetensors or its index, a file NAME.safetensors,
    or where checkpoints are.
    """
    job: str
    """Instead: a job of the namespace, whose newest checkpoint is taken when this one begins; with `bamboo run` the
    folder of this name that --output has written. Where url is said, too, it is only a note.
    """
    best: bool
    """Takes the job's best checkpoint (spec.checkpoint.keepBest), not the newest."""
    step: int
    """The step of the checkpoint to take; required with checkpoints at a url."""
    averaged: bool
    """Takes the averages of weights (training.ema) of a checkpoint."""
    drop: Sequence[str]
    """Names of tensors that are left there, and of the model's that begin anew."""
    extend: Sequence[str]
    """Names of the model's tensors that may have more rows than there are: the others begin anew."""
    rename: Mapping[str, str]
    """The model's names by those there. Both have one "*", which stands for the same characters, or none."""


class TaskFields(TypedDict, total=False):
    """What is trained. Cannot change."""

    entrypoint: Required[str]
    """A Python function as module:function, which is called with the config and returns a Task."""
    config: Mapping[str, Any]
    """The function's argument: any JSON object, of at most 10000 values in 16 levels, with strings of at most 65536
    characters and names of at most 253.
    """
    initialFrom: InitialFromFields
    """The weights that training begins with. A job that goes on from a checkpoint of its own does not look at them."""


class EvaluationFields(TypedDict, total=False):
    """Measures the model on other data from time to time."""

    everySteps: Required[int]
    """Steps from one evaluation to the next. The last state is evaluated, too."""
    batches: int
    """The most batches of microBatchSize samples, from the dataset's beginning. By default all."""
    metric: str
    """Which metric decides which state is the best."""
    goal: Literal["Min", "Max"]
    """Which values of the metric are better."""
    patience: int
    """The job is complete (EarlyStopped) after so many evaluations without a better one."""
    minDelta: float
    """By how much at least the metric must be better to count as better."""


class GenerationFields(TypedDict, total=False):
    """Has a language model continue the task's prompts from time to time."""

    everySteps: Required[int]
    """Steps from one round of texts to the next. The last state writes some, too."""


class LoggerFields(TypedDict, total=False):
    """A logger."""

    name: Required[str]
    """The name of the logger, a DNS label, unique in the list."""
    type: Required[Literal["TensorBoard", "WeightsAndBiases", "MLflow", "Custom"]]
    """What it writes to. Its library has to be in the worker's image. Credentials, such as WANDB_API_KEY, come from the
    environment (worker.template).
    """
    entrypoint: str
    """A Python function as module:function. Called with the config's values as keyword arguments, it returns a function
    that makes the logger.
    """
    config: Mapping[str, Any]
    """Keyword arguments: of TensorBoard folder, of WeightsAndBiases project (required) and those of wandb.init, of
    MLflow experiment (required) and tracking_uri.
    """


class ProfilerFields(TypedDict, total=False):
    """Runs torch.profiler in chosen steps of chosen workers: a file for each worker and step, which TensorBoard and
    Perfetto read. It needs spec.checkpoint, a place of its own (to), or `bamboo run --output`.
    """

    firstStep: Required[int]
    """The first step that is recorded; the first one of a job is 1."""
    lastStep: Required[int]
    """The last one, at most 19 after the first."""
    stage: int
    """Only workers that run this stage."""
    pipeline: int
    """Only workers of this pipeline."""
    worker: str
    """Only this worker, by its name, with or without the job's, or its number."""
    to: str
    """The URL of the files' folder, which workers can write to. By default profiler in the job's history."""


class EmaFields(TypedDict, total=False):
    """Keeps an exponential moving average of the weights, in checkpoints too; bamboo export --ema writes it."""

    decay: Required[float]
    """What of the average stays at each step, such as 0.999; the rest is the weights after the step."""


class UntilFields(TypedDict, total=False):
    """How long to train, in another unit than steps, rounded up to whole steps."""

    steps: int
    """As spec.training.steps."""
    samples: int
    """Samples, counted each time that they come."""
    tokens: int
    """Tokens. The task has to say how many a sample has (tokens_per_sample)."""
    epochs: int
    """Passes over the dataset. The last step may begin another pass."""


class LossScaleFields(TypedDict, total=False):
    """By what losses in fp16 are multiplied. It halves after a step in which a gradient is not finite, and doubles
    after growthInterval steps in which all are.
    """

    initialPower: int
    """The first scale is 2 to this power."""
    growthInterval: int
    """Steps with finite gradients, one after the other, after which the scale doubles."""


class TrainingFields(TypedDict, total=False):
    """How long to train, with which batch sizes and which precision. Cannot change."""

    steps: int
    """Optimizer steps until the job is complete. Or use until."""
    globalBatchSize: Required[int]
    """Samples in a step, over all pipelines."""
    microBatchSize: Required[int]
    """Samples that travel through a pipeline together."""
    seed: int
    """Determines the order of samples and all random numbers."""
    precision: Literal["fp32", "bf16", "fp16"]
    """In which number format layers compute. With fp16 losses are scaled (lossScale)."""
    parameterPrecision: Literal["fp32", "bf16"]
    """The number format of parameters and the optimizer's state. bf16 takes half the memory, and rounds each update."""
    boundaryPrecision: Literal["fp32", "bf16"]
    """The number format of a layer's outputs and their gradients. bf16 halves what stages send to each other, and
    rounds after every layer.
    """
    gradientPrecision: Literal["fp32", "bf16"]
    """The number format of a step's final gradients. bf16 halves what replicas receive."""
    maxGradientNorm: float
    """Gradients with a larger norm, over the whole model, are scaled down to it. By default none are."""
    nonFinite: Literal["Fail", "Skip"]
    """What becomes of a step whose loss or gradient is infinite or not a number. Fail: the job ends, but for a gradient
    in fp16, whose step is skipped. Skip: all workers drop its gradients and go on.
    """
    maxConsecutiveSkips: int
    """More skipped steps in a row end the job, also with precision fp16."""
    evaluation: EvaluationFields
    """Measures the model on other data from time to time."""
    generation: GenerationFields
    """Has a language model continue the task's prompts from time to time."""
    loggers: Sequence[LoggerFields]
    """Other systems that are given the job's history. They need spec.checkpoint (or `bamboo run --output`)."""
    profiler: ProfilerFields
    """Runs torch.profiler in chosen steps of chosen workers: a file for each worker and step, which TensorBoard and
    Perfetto read. It needs spec.checkpoint, a place of its own (to), or `bamboo run --output`.
    """
    ema: EmaFields
    """Keeps an exponential moving average of the weights, in checkpoints too; bamboo export --ema writes it."""
    reproducible: bool
    """Weights come out the same, to the last bit, with any number of stages and pipelines. False sums gradients within
    each pipeline first: less memory with few pipelines, and other bits with another number.
    """
    gradientGroups: int
    """In how many groups of consecutive microbatches gradients are summed; the bits depend on it. There can be no more
    pipelines. A pipeline with n groups needs log2(n) more buffers of the size of a stage's gradient. By default up to
    16 groups of equal size.
    """
    until: UntilFields
    """How long to train, in another unit than steps, rounded up to whole steps."""
    deterministic: bool
    """Work that is done twice gives the same bits, and copies are compared. False lets kernels add in any order, and
    compares nothing.
    """
    lossScale: LossScaleFields
    """By what losses in fp16 are multiplied. It halves after a step in which a gradient is not finite, and doubles
    after growthInterval steps in which all are.
    """
    compile: bool
    """Each layer is compiled by torch.compile, which gives other bits, and needs a C++ compiler and Python's headers in
    the workers' image.
    """


class TopologyFields(TypedDict, total=False):
    """The grid of workers."""

    stages: int | Literal["Auto"]
    """Into how many stages the layers are split; a pipeline has one worker for each. Auto: the coordinator chooses
    stages and pipelines for at most elastic.maxWorkers workers, or there are as many as split has numbers. Cannot
    change.
    """
    pipelines: int
    """The number of pipelines, which share the batch. With stages Auto it is chosen, too."""
    lookahead: int
    """How many forwards more than in plain 1F1B a stage is ahead of the next one. 1 hides the network's time and takes
    memory for more activations. Cannot change.
    """
    activationsOnDevice: int
    """The most microbatches whose activations a stage keeps on its GPU until their backwards; the others' wait in host
    memory. By default all. Can change only while the job is suspended.
    """
    schedule: Literal["Auto", "1F1B", "ZBH1"]
    """The order of forwards and backwards, with the same bits. ZBH1: weight gradients are computed later, which leaves
    about a third of the bubbles; every stage then keeps as many activations as the first one. Auto: with
    elastic.objective the coordinator chooses it, else it is 1F1B. A change takes effect with the next step.
    """
    flowsPerLink: int
    """Over how many TCP connections, for each of the three lanes, a worker spreads frames of 1 MiB or more to another.
    Can change only while the job is suspended.
    """
    split: Sequence[int]
    """The layers of each stage, such as [3, 4, 4, 2]. By default stages are balanced by cost. Cannot change."""


class ElasticFields(TypedDict, total=False):
    """The bounds within which pipelines and stages follow the available nodes."""

    minPipelines: int
    """The fewest pipelines. By default topology.pipelines, or 1 with an objective."""
    maxPipelines: int
    """The most pipelines. By default topology.pipelines, with an objective what the workers and the batch allow."""
    minStages: int
    """With fewer workers than topology.stages the layers are split anew, down to this many stages. If it is
    topology.stages, or with topology.split, a worker runs two stages instead. With an objective, the fewest that may be
    chosen.
    """
    objective: Literal["None", "Throughput", "Value"]
    """Throughput: the coordinator chooses the stages and pipelines that are expected to train the most samples a second
    on the nodes that are there. Value: it also holds only as many workers as train the most samples for their price
    (nodePools), at 0.95 times the speed of maxWorkers or more. By default Throughput with topology.stages Auto, else
    None.
    """
    maxStages: int
    """The most stages that may be chosen. By default topology.stages, or with Auto maxWorkers."""
    maxWorkers: int
    """The most workers that run stages of a chosen grid. By default topology.stages x topology.pipelines; required with
    topology.stages Auto.
    """
    stabilizationSeconds: int
    """How long there must be nodes for another grid before it changes (with an objective, at most)."""
    stragglerPolicy: Literal["Mitigate", "Report", "Ignore"]
    """What is done about workers that are slow for stabilizationSeconds. Mitigate: a standby worker or one that is
    requested takes the place of a slow one, or it gets fewer layers. Report: slow workers are only shown.
    """


class RedundancyFields(TypedDict, total=False):
    """How the job is protected against losses."""

    mode: Literal["None", "LazyForward", "EagerForward", "EagerBackward"]
    """What there is twice. None: nothing. LazyForward: each stage's state. EagerForward: also the forwards of the stage
    that a worker holds a copy of, in its idle time. EagerBackward: also all forwards and backwards. A change takes
    effect with the next step.
    """
    replicas: int
    """How many other workers keep each stage's state in step: those that run the stages before it, then spare ones. So
    many workers, or zones with workers in one zone more, may be lost at once without a lost step. Without effect if
    mode is None.
    """
    placement: Literal["Device", "Host"]
    """Where replicas are kept. Host moves their optimizer state and the activations of redundant forwards to host
    memory. Can change only while the job is suspended.
    """
    transferMBps: int
    """The most MB/s at which a worker sends a whole state. Can change only while the job is suspended."""
    verify: Literal["None", "Report", "Replace"]
    """Whether redundant results, and now and then the copies of each state, are compared bit by bit. Report: a
    difference is reported, with the worker that was wrong if that can be told. Replace: that worker is also replaced,
    and the job goes back to an earlier checkpoint.
    """


class StandbyFields(TypedDict, total=False):
    """Spare workers, which replace lost ones."""

    workers: int
    """How many."""
    stages: int
    """A spare worker keeps replicas of the first so many stages, beside those of redundancy.replicas, to take such a
    stage over in the middle of a step. Its memory has to hold them. With one stage, or with redundancy.mode None, there
    are none.
    """


class NodePoolFields(TypedDict, total=False):
    """A kind of nodes."""

    name: Required[str]
    """The name of the pool, a DNS label, unique in the list."""
    capacity: Literal["Spot", "OnDemand"]
    """Whether nodes may be taken away (Spot) or stay (OnDemand)."""
    preset: Literal["None", "EKS", "Karpenter", "GKE", "AKS"]
    """The cloud or provisioner whose labels and taints such nodes have. None: the worker's template selects nodes."""
    pricePerHour: str
    """The price of one worker for an hour, its share of the node: a decimal number in quotes, such as "0.91", in any
    currency.
    """
    machine: str
    """Its nodes' machine in the prices that the operator reads (--prices), which count instead of pricePerHour."""
    afterSeconds: int
    """How long a pod waits for a node in the pools before this one."""
    maxWorkers: int
    """The most workers in this pool."""
    revert: bool
    """Whether workers move back to an earlier pool once it has nodes again."""
    deviceMemoryGB: int
    """The memory of one of its GPUs in GB, for a grid that is chosen. With worker.allowMixedPlatforms stages fit the
    smallest that a pool says.
    """
    template: Mapping[str, Any]
    """Merged over worker.template for the pods of this pool: another GPU's resource, image, environment, tolerations,
    node selectors.
    """


class SpreadFields(TypedDict, total=False):
    """How workers are spread over zones and nodes. Cannot change."""

    topologyKey: str
    """The node label that says in which zone a node is."""
    policy: Literal["Interleave", "ZonePerPipeline", "SingleZone", "None"]
    """Interleave spreads the pods over zones and nodes, with neighbouring stages in different zones: nearly all traffic
    crosses zones, which most clouds bill. ZonePerPipeline keeps each pipeline in a zone; with two or more the loss of a
    zone costs no step. SingleZone keeps the job in one zone, with whose loss it goes back to its checkpoint. None
    leaves it to the scheduler. With ZonePerPipeline, unless there is an elastic.objective, and SingleZone a pod waits
    if its zone has no more nodes.
    """
    workersPerNode: int
    """How many of the job's workers a node has room for, such as one for each GPU. With more than one nodes are filled,
    and neighbouring stages and replicas placed on different ones where possible.
    """


class PersistentVolumeClaimFields(TypedDict, total=False):
    """A volume that every worker mounts; its access mode has to allow several pods."""

    claimName: Required[str]
    """The name of a PersistentVolumeClaim in the job's namespace."""


class StorageFields(TypedDict, total=False):
    """Where to write, uri or persistentVolumeClaim. Each job needs its own."""

    uri: str
    """A URL such as s3://bucket/folder, gs://bucket/folder, az://container/folder or file:///folder. Credentials come
    from the pod's environment or service account.
    """
    persistentVolumeClaim: PersistentVolumeClaimFields
    """A volume that every worker mounts; its access mode has to allow several pods."""


class CheckpointFields(TypedDict, total=False):
    """Where checkpoints are written, and how often; to a claim also the final weights. Cannot change."""

    storage: Required[StorageFields]
    """Where to write, uri or persistentVolumeClaim. Each job needs its own."""
    everySteps: int
    """Steps between checkpoints; by default 200, or fewer where that is worth it. The last step has one, too."""
    keepLatest: int
    """How many checkpoints stay."""
    keepInMemory: bool
    """Each worker keeps in host memory what it has written of the newest checkpoint, and while one is being written of
    two, so that a job that goes back reads only what was lost.
    """
    keepBest: bool
    """A checkpoint of each evaluated state, of which the best (training.evaluation.metric) stays."""
    resume: Literal["Latest", "Never"]
    """Latest: the job starts from the newest complete checkpoint, if any. Never: it starts at step 0, and goes back
    only to checkpoints of its own.
    """
    allowOtherData: bool
    """False ends a job (DataMismatch) whose data are not the checkpoint's."""


class ResourcesFields(TypedDict, total=False):
    """Resources of a worker's container."""

    limits: Mapping[str, str | int]
    """The most it may use, by resource name, such as nvidia.com/gpu or memory."""
    requests: Mapping[str, str | int]
    """What it is guaranteed, by resource name. The default is the limits."""


class WorkerFields(TypedDict, total=False):
    """The pods that workers run in. After a change the workers are replaced one after the other."""

    image: str
    """The container image, with the task's module in it. By default the operator's."""
    resources: ResourcesFields
    """Resources of a worker's container."""
    template: Mapping[str, Any]
    """Merged into the worker's PodTemplateSpec, of which the container is called trainer; limited as task.config is."""
    allowMixedPlatforms: bool
    """False refuses a worker whose torch, CUDA, driver, GPU model, kind of processor or settings differ from those of
    the others. With true bits depend on who ran what, and copies are not compared.
    """
    devices: int
    """The GPUs of a worker (nvidia.com/gpu), each of which runs a part of its stage; a stage has at least as many
    layers. Can change only while the job is suspended.
    """


class QueueFields(TypedDict, total=False):
    """The Kueue queue in which the job waits. Can change only while the job is suspended."""

    name: Required[str]
    """The name of a LocalQueue in the job's namespace."""
    priorityClass: str
    """The WorkloadPriorityClass by which the job waits. By default worker.template's priorityClassName counts."""
    topology: bool
    """Whether Kueue chooses the domains of the workers, such as racks: as spread says, whose topologyKey is a level of
    the flavor's Topology.
    """


class BudgetFields(TypedDict, total=False):
    """What the job may cost, by the prices of the node pools, and by when it is to be done."""

    money: str
    """For the whole job, a decimal number in quotes with at most 4 decimals. When it is spent the job is suspended,
    until there is more.
    """
    moneyPerHour: str
    """What the workers may cost in an hour, a decimal number in quotes; the smallest grid is held in any case."""
    doneBy: str
    """When the last step is to be done, in RFC 3339 with a zone, such as 2026-12-24T18:00:00Z. With elastic.objective
    Value the job holds as many workers as that takes.
    """


class RuleFields(TypedDict, total=False):
    """One rule."""

    name: Required[str]
    """The name of the rule, a DNS label, unique in the list."""
    onExitCodes: Required[Sequence[int]]
    """The exit codes that the rule matches."""
    action: Required[Literal["RestartWorker", "FailJob", "Ignore"]]
    """RestartWorker replaces the worker, and the failure counts towards backoffLimit. Ignore does the same, but the
    failure does not count. FailJob ends the job.
    """


class FailurePolicyFields(TypedDict, total=False):
    """What to do when a worker fails. A lost node is no failure. Cannot change."""

    backoffLimit: int
    """More failures without a committed step in between end the job."""
    rules: Sequence[RuleFields]
    """What to do for which exit code. The first that matches applies, else RestartWorker."""


class JobFields(TypedDict, total=False):
    """The parts of a job beside its task."""

    suspend: bool
    """True stops the job and releases its nodes. Later it goes on from a checkpoint that it writes first, or at step 0
    if it keeps none.
    """
    managedBy: str
    """The controller that manages the job, as domain/path; Bamboo's operator ignores others. Cannot change."""
    training: Required[TrainingFields]
    """How long to train, with which batch sizes and which precision. Cannot change."""
    topology: TopologyFields
    """The grid of workers."""
    elastic: ElasticFields
    """The bounds within which pipelines and stages follow the available nodes."""
    redundancy: RedundancyFields
    """How the job is protected against losses."""
    standby: StandbyFields
    """Spare workers, which replace lost ones."""
    nodePools: Sequence[NodePoolFields]
    """Where workers may run; the pools are tried in this order, unless poolOrder says another one. By default on any
    node that fits.
    """
    poolOrder: Literal["Listed", "Value"]
    """Listed tries nodePools as they are listed. Value tries first where a worker's hour costs least, by price and
    recorded losses (docs/operating.md); pools with afterSeconds keep their places. By default Value with
    elastic.objective Value, else Listed.
    """
    spread: SpreadFields
    """How workers are spread over zones and nodes. Cannot change."""
    checkpoint: CheckpointFields
    """Where checkpoints are written, and how often; to a claim also the final weights. Cannot change."""
    worker: WorkerFields
    """The pods that workers run in. After a change the workers are replaced one after the other."""
    queue: QueueFields
    """The Kueue queue in which the job waits. Can change only while the job is suspended."""
    budget: BudgetFields
    """What the job may cost, by the prices of the node pools, and by when it is to be done."""
    failurePolicy: FailurePolicyFields
    """What to do when a worker fails. A lost node is no failure. Cannot change."""
    activeDeadlineSeconds: int
    """How long the job may run before it fails."""
    progressDeadlineSeconds: int
    """How long it may go without a committed step before it fails."""
    ttlSecondsAfterFinished: int
    """How long after its end the job is deleted; by default never."""
    cleanPodPolicy: Literal["Running", "All", "None"]
    """Which pods are deleted when the job ends: those that still run, all, or none."""
    degradedPriorityClassName: str
    """The PriorityClass of pods that are made while a worker runs two stages or a stage has no second copy: they get a
    node before lesser work. Others have that of worker.template.
    """
    disruptionBudget: Literal["OneAtATime", "None"]
    """OneAtATime creates a PodDisruptionBudget: evictions take one worker, and the next when every stage is held by two
    workers again.
    """
