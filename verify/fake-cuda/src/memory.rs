//! Memory of the fake's GPUs: a memfd each, mapped once without any right, at the address that callers get, and once for copies.

use std::ffi::c_int;
use std::ptr::null_mut;

use crate::state::{Allocation, code};

fn map(fd: c_int, len: usize, rights: c_int) -> Result<usize, c_int> {
    // SAFETY: a null hint lets the kernel choose a range that nobody uses.
    let base = unsafe { libc::mmap(null_mut(), len, rights, libc::MAP_SHARED, fd, 0) };
    if base == libc::MAP_FAILED { Err(code::OUT_OF_MEMORY) } else { Ok(base.expose_provenance()) }
}

fn unmap(base: usize, len: usize) {
    // SAFETY: mapped by `map` with this length; the allocation is out of the table, so nobody finds it any more.
    unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(base), len) };
}

/// Memory behind a descriptor, which it takes; the address that callers get comes with it.
pub(crate) fn of(fd: c_int, ordinal: u16, len: usize) -> Result<(usize, Allocation), c_int> {
    let base = map(fd, len, libc::PROT_NONE)?;
    let open = map(fd, len, libc::PROT_READ | libc::PROT_WRITE).inspect_err(|_| unmap(base, len))?;
    Ok((base, Allocation { ordinal, len, open, fd, imported: None }))
}

/// New memory, full of a pattern: real memory is not cleared either.
pub(crate) fn allocate(ordinal: u16, len: usize) -> Result<(usize, Allocation), c_int> {
    // SAFETY: the name is a string; the descriptor is new.
    let fd = unsafe { libc::memfd_create(c"fake-cuda".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: on the new descriptor.
    if fd < 0 || unsafe { libc::ftruncate(fd, len as libc::off_t) } != 0 {
        return Err(code::OUT_OF_MEMORY);
    }
    let (base, allocation) = of(fd, ordinal, len)?;
    // SAFETY: mapped just now, `len` bytes long, known to nobody else.
    unsafe { std::ptr::with_exposed_provenance_mut::<u8>(allocation.open).write_bytes(0xA5, len) };
    Ok((base, allocation))
}

pub(crate) fn free(base: usize, allocation: &Allocation) {
    unmap(base, allocation.len);
    unmap(allocation.open, allocation.len);
    // SAFETY: the allocation's own descriptor, closed once: it is out of the table.
    unsafe { libc::close(allocation.fd) };
}

const MAGIC: &[u8; 8] = b"fakecuda";

/// What another process finds the memory by: the descriptor in this one.
pub(crate) fn export(allocation: &Allocation) -> [u8; 64] {
    let mut handle = [0; 64];
    handle[..8].copy_from_slice(MAGIC);
    handle[8..12].copy_from_slice(&std::process::id().to_le_bytes());
    handle[12..16].copy_from_slice(&allocation.fd.to_le_bytes());
    handle[16..24].copy_from_slice(&(allocation.len as u64).to_le_bytes());
    handle
}

/// Opens what another process exported.
pub(crate) fn import(handle: &[u8; 64], ordinal: u16) -> Result<(usize, Allocation), c_int> {
    let word = |at: usize| u32::from_le_bytes([handle[at], handle[at + 1], handle[at + 2], handle[at + 3]]);
    if &handle[..8] != MAGIC {
        return Err(code::INVALID_VALUE);
    }
    if word(8) == std::process::id() {
        return Err(code::INVALID_CONTEXT);
    }
    let path = format!("/proc/{}/fd/{}\0", word(8), word(12));
    // SAFETY: the path ends with a nul.
    let fd = unsafe { libc::open(path.as_ptr().cast(), libc::O_RDWR | libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(code::INVALID_VALUE);
    }
    let (base, mut allocation) = of(fd, ordinal, word(16) as usize)?;
    allocation.imported = Some((1, *handle));
    Ok((base, allocation))
}
