"""One run on many devices: processes, whole-matrix owners, FSDP2, faults.

`world` joins the processes that `steepen train --gpus`, torchrun or srun started; `sharded_optimizer` is
the default (`--shard optimizer`, ZeRO-1), `full_shard` is FSDP2 (`--shard full`). `environment` and `owners`
import without torch.
"""
