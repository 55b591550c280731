//! cuBLASLt and hipBLASLt.
