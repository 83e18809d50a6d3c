//! Puts kernels that were compiled ahead of time where the crate includes them; an empty file where there are none.
//!
//! `cargo xtask dist` sets the variable. Whether the code fits the sources is checked when it is loaded.

use std::path::PathBuf;

const VARIABLE: &str = "REFRAIN_PREBUILT_KERNELS";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed={VARIABLE}");
    #[expect(clippy::disallowed_methods, reason = "a build script hears from cargo through the environment")]
    let [given, folder] = [VARIABLE, "OUT_DIR"].map(|name| std::env::var_os(name).map(PathBuf::from));
    let archive = given.map_or_else(Vec::new, |path| {
        println!("cargo:rerun-if-changed={}", path.display());
        std::fs::read(&path).unwrap_or_else(|e| panic!("{VARIABLE} names {}: {e}", path.display()))
    });
    let to = folder.expect("cargo sets OUT_DIR").join("prebuilt.bin");
    std::fs::write(&to, archive).unwrap_or_else(|e| panic!("cannot write {}: {e}", to.display()));
}
