//! Copies prebuilt kernels to where the crate includes them, or writes an empty file if there are none.
//!
//! `cargo xtask dist` sets the variable. Loading checks whether the code matches the sources.

use std::path::PathBuf;

const VARIABLE: &str = "REFRAIN_PREBUILT_KERNELS";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed={VARIABLE}");
    #[expect(
        clippy::disallowed_methods,
        reason = "cargo passes build scripts their settings in the environment"
    )]
    let [given, folder] = [VARIABLE, "OUT_DIR"].map(|name| std::env::var_os(name).map(PathBuf::from));
    let archive = given.map_or_else(Vec::new, |path| {
        println!("cargo:rerun-if-changed={}", path.display());
        std::fs::read(&path).unwrap_or_else(|e| panic!("{VARIABLE} names {}: {e}", path.display()))
    });
    let to = folder.expect("cargo sets OUT_DIR").join("prebuilt.bin");
    std::fs::write(&to, archive).unwrap_or_else(|e| panic!("cannot write {}: {e}", to.display()));
}
