//! How do the host and the kernels agree on parameters? Each kernel takes one struct; each has a `#[repr(C)]` mirror, declared by
//! [`params!`] in the file of its operation. `bytemuck::Pod` refuses padding at compile time, the compile gates compare sizes
//! with the binaries, and fields keep the names of the `.cu` file.

/// Declares the mirrors of kernel parameters.
macro_rules! params {
    ($($(#[$meta:meta])* struct $name:ident { $($field:ident: $type:ty,)* })*) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
        pub(super) struct $name { $(pub $field: $type,)* }
    )*};
}
pub(super) use params;
