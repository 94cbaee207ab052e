//! Gives the library the name by which it is asked for first: whoever opens `libcuda.so` after it was loaded gets it, also on
//! a machine with a GPU, where the vendor's own lies in the path.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
    println!("cargo:rerun-if-changed=build.rs");
}
