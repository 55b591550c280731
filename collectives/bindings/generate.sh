#!/usr/bin/env bash
# Writes collectives/src/ccl/sys.rs from NCCL's header. RCCL has the same names, values and signatures.
# 2.18.3: the oldest with everything we call, and with the shortest configuration structure that newer libraries take.
set -euo pipefail
cd "$(dirname "$0")/../.."
script=collectives/bindings/generate.sh
. kernels/bindings/tools.sh

wheel nvidia-nccl-cu12==2.18.3 '*/nccl.h'
# What the header takes from CUDA is one handle.
printf '#include <stddef.h>\ntypedef struct CUstream_st *cudaStream_t;\n' > "$work/headers/cuda_runtime.h"
touch "$work/headers/cuda_fp16.h" "$work/headers/cuda_bf16.h"

results='nccl(Success|InProgress|RemoteError|UnhandledCudaError|SystemError|InternalError|InvalidArgument|InvalidUsage)'
numbers='nccl(Sum|Uint8|Int32|Float32|Bfloat16)|NCCL_UNIQUE_ID_BYTES'
types='ncclComm_t|ncclResult_t|ncclUniqueId|ncclConfig_t'
calls='nccl(GetVersion|GetUniqueId|CommInitRankConfig|CommInitRank|CommGetAsyncError|CommFinalize|CommDestroy|CommAbort|CommCount|AllGather|ReduceScatter|AllReduce|Broadcast|Send|Recv|GroupStart|GroupEnd|GetErrorString|GetLastError)'
# bf16 is declared only where the compiler of CUDA says that it has it.
generate collectives/src/ccl/sys.rs "$work/headers/nvidia/nccl/include/nccl.h" "$results|$numbers|$types|$calls" \
    -I"$work/headers" -D__CUDA_BF16_TYPES_EXIST__=1

# The numbers of RCCL, machine-readable: what the tests compare with where they find it.
"$python" -m pip install --quiet rocm-bindings-systems==10.0.0.0.1.2 || true
