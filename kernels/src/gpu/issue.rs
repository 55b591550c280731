//! What the issuing thread of a stream puts on the driver's queue for an operation: cells for faults, arguments, kernels, or a product
//! of the vendor's library.
#![allow(unsafe_code)]

use super::calls::At;
use super::driver::blas::{Blas, WORKSPACE_BYTES};
use super::launch::{Dense, Work};
use super::memory::OnDevice;
use super::ring;
use super::stream::{Issuer, Shared};
use crate::memory::Mapping;
use crate::{Error, Result};
use std::time::Duration;

impl Shared {
    /// Makes room for pieces of these bytes that are used together.
    pub(super) fn reserve(&self, pieces: impl Iterator<Item = usize>, issuer: &mut Issuer) -> Result<()> {
        if issuer.ring.is_full(pieces.map(ring::room).sum()) {
            let behind = self.point(issuer);
            if let Some(before) = issuer.ring.turn(behind) {
                before.wait(Duration::MAX)?;
            }
        }
        Ok(())
    }

    /// A piece of staging memory.
    pub(super) fn piece(&self, bytes: usize, issuer: &mut Issuer) -> Result<ring::Piece> {
        self.reserve(std::iter::once(bytes), issuer)?;
        issuer.ring.take(bytes)
    }

    pub(super) fn kernels(&self, work: Work, issuer: &mut Issuer) -> Result<()> {
        let (driver, s) = (self.driver().clone(), self.raw);
        issuer.dirty = true;
        let pieces = work.launches.iter().filter_map(|l| l.data.as_ref()).map(|(_, bytes)| bytes.len());
        self.reserve(pieces.chain(work.fault.map(|_| 8)), issuer)?;
        let cell = match &work.fault {
            Some(_) => Some(self.piece(8, issuer)?),
            None => None,
        };
        if let Some(cell) = cell {
            // SAFETY: eight bytes of the ring.
            unsafe { driver.set_bytes(s, cell.device, 0xFF, 8)? };
        }
        for launch in work.launches {
            if let (Some(blas), Some(dense)) = (&self.setup.blas, &launch.dense)
                && self.by_library(blas, dense, issuer)?
            {
                continue;
            }
            let data = match &launch.data {
                Some((at, bytes)) => Some((*at, self.upload(bytes, issuer)?)),
                None => None,
            };
            let function = self.setup.code.function(launch.kernel, launch.shared_bytes)?;
            issuer.params.clear();
            issuer.params.resize(launch.params.len().div_ceil(8), 0);
            let params: &mut [u8] = bytemuck::cast_slice_mut(&mut issuer.params);
            params[..launch.params.len()].copy_from_slice(&launch.params);
            for (at, address) in [launch.fault_at.zip(cell.map(|c| c.device)), data].into_iter().flatten() {
                let place = params.get_mut(at..at + 8);
                place
                    .ok_or_else(|| Error::Shape { op: work.op, what: format!("{}: no place for an address", launch.kernel) })?
                    .copy_from_slice(&address.to_ne_bytes());
            }
            // SAFETY: the operation built the struct of this kernel; views of its memory are held until a point behind it.
            let launched = unsafe { driver.launch(s, function, launch.grid, launch.threads, launch.shared_bytes, &mut issuer.params) };
            launched.map_err(|e| self.task_error(work.op, format!("{}: {e}", launch.kernel)))?;
        }
        if let (Some(cell), Some(fault)) = (cell, work.fault) {
            // SAFETY: eight bytes of the ring.
            unsafe { driver.to_host(s, cell.host, cell.device, 8)? };
            let (at, op, stream) = (At(cell.host as u64), work.op, self.name.to_string());
            issuer.held.checks.push(Box::new(move || {
                // SAFETY: the copy to these bytes of the ring has run, and they are not used again before this point was passed.
                let cell = unsafe { at.host().cast::<u64>().read_volatile() };
                fault.check(op, cell).map_err(|e| Error::Task { stream, task: op.to_string(), why: e.to_string() })
            }));
        }
        Ok(())
    }

    /// Lets the vendor's library do a product; false: it does not.
    fn by_library(&self, blas: &Blas, dense: &Dense, issuer: &mut Issuer) -> Result<bool> {
        let workspace = match &issuer.workspace {
            Some(workspace) => workspace.address(),
            None => {
                let made = OnDevice::new(self.driver(), "workspace of the vendor's products", WORKSPACE_BYTES)?;
                issuer.workspace.insert(made).address()
            }
        };
        // SAFETY: views of the operands are held until a point behind the product; the workspace is this stream's own.
        unsafe { blas.enqueue(self.raw, dense, workspace) }
    }

    /// Bytes on the device, behind what was issued so far.
    fn upload(&self, bytes: &[u8], issuer: &mut Issuer) -> Result<u64> {
        if bytes.len() > ring::MOST_BYTES {
            return Err(Error::Shape { op: "upload", what: format!("{} bytes for one launch, at most {}", bytes.len(), ring::MOST_BYTES) });
        }
        let piece = self.piece(bytes.len(), issuer)?;
        // SAFETY: a piece of the ring of this length, not in use.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), piece.host, bytes.len());
            self.driver().to_device(self.raw, piece.device, piece.host, bytes.len())?;
        }
        Ok(piece.device)
    }
}
