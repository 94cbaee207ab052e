//! A binary without std, without a heap and without a C library: it links only if `millpond-core` needs none of them.
//!
//! Exit code 0: the structures did what they should. 1: they did not. 2: something panicked.
#![no_std]
#![no_main]

use core::arch::{asm, naked_asm};

use millpond_core::batch::{Extent, Move, RegionId, Split};
use millpond_core::extent::{Extents, Geometry, Node};
use millpond_core::page::{Page, Pages};
use millpond_core::slab::{Slab, Slot};

#[panic_handler]
fn on_panic(_: &core::panic::PanicInfo<'_>) -> ! {
    exit(2)
}

// What the compiler itself calls where a C library would have it. `rep` keeps it from finding a call to itself in a loop.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(target: *mut u8, source: *const u8, len: usize) -> *mut u8 {
    // SAFETY: the compiler passes ranges valid for `len` bytes that do not overlap.
    unsafe { asm!("rep movsb", inout("rcx") len => _, inout("rdi") target => _, inout("rsi") source => _, options(nostack)) }
    target
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memset(target: *mut u8, byte: i32, len: usize) -> *mut u8 {
    // SAFETY: the compiler passes a range valid for `len` bytes.
    unsafe { asm!("rep stosb", inout("rcx") len => _, inout("rdi") target => _, in("eax") byte, options(nostack)) }
    target
}

// core was compiled with unwinding; nothing here unwinds.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

#[unsafe(naked)]
#[unsafe(no_mangle)]
extern "C" fn _start() -> ! {
    // The kernel starts us with an aligned stack; a function expects it as after a call.
    naked_asm!("xor ebp, ebp", "and rsp, -16", "call {main}", "ud2", main = sym main)
}

extern "C" fn main() -> ! {
    exit(if works() { 0 } else { 1 })
}

fn works() -> bool {
    let mut slab = Slab::new([const { Slot::EMPTY }; 4]);
    let Ok(handle) = slab.insert(7u32) else { return false };
    let stale_is_refused = slab.remove(handle) == Some(7) && slab.get(handle).is_none();

    let mut pages = Pages::new([const { Page::EMPTY }; 4]);
    let Ok(page) = pages.allocate() else { return false };
    let sealed = pages.seal(page).is_ok() && pages.free(page).is_ok() && pages.counts().free == 4;

    let geometry = Geometry { len: 1 << 20, unit: 64 };
    let Ok(mut extents) = Extents::new([const { Node::EMPTY }; 16], geometry) else { return false };
    let Ok(extent) = extents.allocate(1000) else { return false };
    let freed = extents.free(extent.handle).is_ok() && extents.largest_free_len() == 1 << 20;

    let region = RegionId { slot: 0, epoch: 1 };
    let Ok(whole) = Move::new(Extent::new(region, 0, 100), Extent::new(region, 100, 100)) else { return false };
    stale_is_refused && sealed && freed && Split::new(&[whole], 30).count() == 4
}

fn exit(code: i32) -> ! {
    // SAFETY:
    // - exit_group takes one integer and does not return; no memory is touched.
    unsafe { asm!("syscall", in("rax") 231, in("rdi") code, options(noreturn, nostack)) }
}
