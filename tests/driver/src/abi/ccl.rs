//! NCCL and RCCL.
