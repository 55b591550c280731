//! What proves that a process belongs to the job? 32 random bytes in a file that only the job's owner can read.

use super::fail;
use crate::Result;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// The job's secret. Printing it shows nothing.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Random bytes from the system.
pub(super) fn random_bytes() -> Result<[u8; 32]> {
    let mut bytes = [0; 32];
    match File::open("/dev/urandom").and_then(|mut f| f.read_exact(&mut bytes)) {
        Ok(()) => Ok(bytes),
        Err(e) => fail(format!("reading random bytes from /dev/urandom: {e}")),
    }
}

impl Secret {
    /// A new random secret.
    pub fn random() -> Result<Secret> {
        random_bytes().map(Secret)
    }

    /// A secret that was agreed on by other means.
    pub fn from_bytes(bytes: [u8; 32]) -> Secret {
        Secret(bytes)
    }

    /// Makes a random secret and a new file for it: mode 0600, one line of 64 hexadecimal digits.
    /// An existing file is never overwritten.
    pub fn create(path: &Path) -> Result<Secret> {
        let secret = Secret::random()?;
        let mut line = String::with_capacity(65);
        for byte in secret.0 {
            // Writing to a String cannot fail.
            let _ = write!(line, "{byte:02x}");
        }
        line.push('\n');
        let written = || -> std::io::Result<()> {
            let mut file =
                OpenOptions::new().write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC).open(path)?;
            // The umask may have taken bits away.
            file.set_permissions(Permissions::from_mode(0o600))?;
            file.write_all(line.as_bytes())?;
            file.sync_all()
        };
        match written() {
            Ok(()) => Ok(secret),
            Err(e) => fail(format!("creating the job's secret {}: {e}", path.display())),
        }
    }

    /// Reads the file, which must be a regular file of this user with mode 0600.
    pub fn read(path: &Path) -> Result<Secret> {
        let shown = path.display();
        let open = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK).open(path);
        let file = match open {
            Ok(file) => file,
            Err(e) => return fail(format!("opening the job's secret {shown}: {e}")),
        };
        // Asked of the open file, so that nobody can exchange it between the look and the read.
        let meta = match file.metadata() {
            Ok(meta) => meta,
            Err(e) => return fail(format!("reading the owner of the job's secret {shown}: {e}")),
        };
        let (mode, owner, me) = (meta.mode() & 0o7777, meta.uid(), rustix::process::geteuid().as_raw());
        if !meta.is_file() {
            return fail(format!("the job's secret {shown} is no regular file"));
        }
        if owner != me {
            return fail(format!("the job's secret {shown} belongs to user {owner}, expected {me} (this process)"));
        }
        if mode != 0o600 {
            return fail(format!(
                "the job's secret {shown} has mode {mode:04o}, expected 0600; others may have read it: start the job anew"
            ));
        }
        let mut text = String::new();
        if let Err(e) = file.take(128).read_to_string(&mut text) {
            return fail(format!("reading the job's secret {shown}: {e}"));
        }
        match parse(text.trim_end()) {
            Some(bytes) => Ok(Secret(bytes)),
            None => fail(format!("the job's secret {shown} is not 64 hexadecimal digits; start the job anew")),
        }
    }

    pub(super) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

fn parse(hex: &str) -> Option<[u8; 32]> {
    let digits: Vec<u8> = hex.chars().map(|c| c.to_digit(16).map(|d| d as u8)).collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits.chunks(2).map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit)).collect();
    (digits.len() == 64).then_some(bytes)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_and_read_and_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job");
        let secret = Secret::create(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(Secret::read(&path).unwrap(), secret);
        assert!(Secret::create(&path).is_err(), "an existing secret is kept");
        assert_eq!(format!("{secret:?}"), "Secret(..)");

        std::fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        assert!(Secret::read(&path).unwrap_err().to_string().contains("mode 0640, expected 0600"));
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(Secret::read(&link).is_err(), "a link could point at someone else's file");
        std::fs::write(&path, "short").unwrap();
        assert!(Secret::read(&path).unwrap_err().to_string().contains("64 hexadecimal digits"));
        assert!(Secret::read(folder.path()).is_err());
    }
}
