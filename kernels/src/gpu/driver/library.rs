//! Where does a vendor's library come from? From the path that the configuration gives, else from the names it is installed under.
#![allow(unsafe_code)]

use crate::{Error, Result};
use libloading::Library;
use std::path::Path;

/// Functions by name.
pub(super) enum Symbols {
    /// Loaded here.
    Own { library: Library, name: String },
    /// Loaded by cudarc, for the rest of the process.
    Cudarc { library: &'static Library, name: &'static str },
}

impl Symbols {
    /// The library at `path`, or the first of `names` that loads; `None`: no path was given and no name is there.
    ///
    /// # Errors
    /// [`Error::Library`]: what is at `path` cannot be loaded.
    pub fn open(path: Option<&Path>, names: &[&str]) -> Result<Option<Symbols>> {
        if let Some(path) = path {
            // SAFETY: the vendor's library, by the user's own choice; its initializers have no demands on us.
            let library = unsafe { Library::new(path) };
            let name = path.display().to_string();
            return match library {
                Ok(library) => Ok(Some(Symbols::Own { library, name })),
                Err(e) => Err(Error::Library { library: name, why: format!("{e}; check the path in [device.libraries]") }),
            };
        }
        // SAFETY: as above, by the vendor's own names.
        let found = names.iter().find_map(|name| unsafe { Library::new(*name) }.ok().map(|l| (l, name.to_string())));
        Ok(found.map(|(library, name)| Symbols::Own { library, name }))
    }

    /// Its name or path.
    pub fn name(&self) -> &str {
        match self {
            Symbols::Own { name, .. } => name,
            Symbols::Cudarc { name, .. } => name,
        }
    }

    /// The function of this name, as an `F`.
    ///
    /// # Safety
    /// `F` is a function pointer of the signature that the vendor documents for `symbol`.
    ///
    /// # Errors
    /// [`Error::Library`]: it is missing.
    pub unsafe fn get<F: Copy>(&self, symbol: &str) -> Result<F> {
        let library = match self {
            Symbols::Own { library, .. } => library,
            Symbols::Cudarc { library, .. } => library,
        };
        // SAFETY: by contract.
        let found = unsafe { library.get::<F>(symbol.as_bytes()) };
        found.map(|f| *f).map_err(|_| Error::Library {
            library: self.name().to_string(),
            why: format!(
                "has no function {symbol}; install a driver of this vendor that is newer, or name another library in [device.libraries]"
            ),
        })
    }
}
