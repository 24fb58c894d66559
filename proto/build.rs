//! Compiles the `.proto` files with protox: no protoc is needed on the machine.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::{env, fs};

use prost::Message as _;

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new("proto");
    let mut files = Vec::new();
    find(root, &mut files)?;
    files.sort();
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(&files, [root])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    // Reflection serves this set; the code generator does not write it.
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .bytes(".tenure.raft.v1")
        .bytes(".tenure.stored.v1")
        .compile_fds(descriptors)?;
    Ok(())
}

fn find(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), Box<dyn Error>> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            find(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "proto") {
            files.push(path);
        }
    }
    Ok(())
}
