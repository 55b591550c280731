//! What would a run take on a machine that may not be here? The hardware catalogue, and what each unit of work costs on it.

pub mod catalogue;
pub mod number;
pub mod sheet;

pub use catalogue::{Catalogue, Cluster};
pub use number::{Case, How, Number};
pub use sheet::{Machine, Part, Sheet};
