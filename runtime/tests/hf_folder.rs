//! Where models are found: directories, links, the hub cache; and where they must not be looked for.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use zrt::hf::{ArchConfig, Weights, folder};

fn golden() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tiny_model").canonicalize().unwrap()
}

/// Lays a model out as the Hugging Face cache does: blobs, and links to them in a snapshot.
fn cache(top: &Path, id: &str, revision: &str) {
    let repo = top.join(format!("models--{}", id.replace('/', "--")));
    let snapshot = repo.join("snapshots").join(revision);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(repo.join("blobs")).unwrap();
    for (i, name) in ["config.json", "model.safetensors"].iter().enumerate() {
        fs::copy(golden().join(name), repo.join(format!("blobs/{i}"))).unwrap();
        symlink(format!("../../blobs/{i}"), snapshot.join(name)).unwrap();
    }
}

#[test]
fn a_hub_id_is_found_in_the_cache_through_its_links() {
    let top = tempfile::tempdir().unwrap();
    cache(top.path(), "org/tiny", "abc");
    let find = |id: &str| folder::resolve_in(id, None, Some(top.path().into()));
    let dir = find("org/tiny").unwrap();
    Weights::open(&dir).unwrap().validate(&ArchConfig::load(&dir).unwrap()).unwrap();
    // Two revisions: refs/main decides, and without it the user does.
    cache(top.path(), "org/tiny", "def");
    assert!(find("org/tiny").unwrap_err().to_string().contains("2 revisions"));
    fs::create_dir_all(top.path().join("models--org--tiny/refs")).unwrap();
    fs::write(top.path().join("models--org--tiny/refs/main"), "def\n").unwrap();
    assert!(find("org/tiny").unwrap().ends_with("snapshots/def"));
    let e = find("org/absent").unwrap_err().to_string();
    assert!(e.contains("hf download org/absent") && e.contains(&*top.path().to_string_lossy()), "{e}");
    let e = find("./no/such/dir").unwrap_err().to_string();
    assert!(e.contains("no such directory") && !e.contains("download"), "{e}");
}

#[test]
fn a_directory_beside_the_configuration_comes_first() {
    let top = tempfile::tempdir().unwrap();
    symlink(golden(), top.path().join("m")).unwrap();
    assert_eq!(folder::resolve_in("m", Some(top.path()), None).unwrap(), top.path().join("m"));
    let e = folder::resolve_in("m/config.json", Some(top.path()), None).unwrap_err().to_string();
    assert!(e.contains("is a file"), "{e}");
}

#[test]
fn an_index_cannot_point_outside_its_folder() {
    let top = tempfile::tempdir().unwrap();
    fs::copy(golden().join("model.safetensors"), top.path().join("secret.safetensors")).unwrap();
    let dir = top.path().join("model");
    fs::create_dir(&dir).unwrap();
    let absolute = top.path().join("secret.safetensors");
    for name in ["../secret.safetensors", absolute.to_str().unwrap(), "sub/../x.safetensors", "..", "x.bin"] {
        let index = serde_json::json!({"weight_map": {"model.norm.weight": name}});
        fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
        let e = Weights::open(&dir).unwrap_err().to_string();
        assert!(e.contains("in its own folder"), "{name}: {e}");
    }
}

#[test]
fn missing_shards_and_pickles_are_named() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("pytorch_model.bin"), b"x").unwrap();
    let e = Weights::open(dir.path()).unwrap_err().to_string();
    assert!(e.contains("pytorch_model.bin") && e.contains("never"), "{e}");
    fs::copy(golden().join("model.safetensors"), dir.path().join("model-00001-of-00003.safetensors")).unwrap();
    let index = serde_json::json!({"weight_map": {
        "model.norm.weight": "model-00001-of-00003.safetensors", "a": "model-00002-of-00003.safetensors", "b": "model-00003-of-00003.safetensors"}});
    fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    let e = Weights::open(dir.path()).unwrap_err().to_string();
    assert!(e.contains("model-00002-of-00003") && e.contains("model-00003-of-00003"), "{e}");
    let index = serde_json::json!({"weight_map": {"nowhere": "model-00001-of-00003.safetensors"}});
    fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    assert!(Weights::open(dir.path()).unwrap_err().to_string().contains("nowhere"));
    let empty = tempfile::tempdir().unwrap();
    assert!(Weights::open(empty.path()).unwrap_err().to_string().contains("no model.safetensors"));
}
