//! A machine made of files: what sysfs and /dev would say of it, in a folder that goes away with the test.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::probe::{Machine, Roots};

/// Vendors of the fixtures.
pub(super) const NVIDIA: &str = "0x10de";
pub(super) const AMD: &str = "0x1002";

pub(super) struct Tree {
    root: PathBuf,
    device_files: AtomicU32,
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

impl Tree {
    pub(super) fn new(nodes: u32) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("millpond-probe-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let tree = Self { root: std::env::temp_dir().join(name), device_files: AtomicU32::new(0) };
        for node in 0..nodes {
            tree.folder(&format!("sys/devices/system/node/node{node}"));
        }
        for class in ["sys/class/infiniband", "sys/class/net", "sys/bus/pci/devices", "sys/bus/pci/drivers"] {
            tree.folder(class);
        }
        tree
    }

    pub(super) fn read(&self) -> Machine {
        Machine::read(&Roots { sys: self.root.join("sys"), dev: self.root.join("dev") })
    }

    fn folder(&self, path: &str) {
        fs::create_dir_all(self.root.join(path)).unwrap();
    }

    pub(super) fn write(&self, path: &str, text: &str) {
        let path = self.root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }

    pub(super) fn remove(&self, path: &str) {
        fs::remove_file(self.root.join(path)).unwrap();
    }

    fn link(&self, path: &str, target: &str) {
        let path = self.root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(self.root.join(target), path).unwrap();
    }

    /// A PCI device at the end of `path`, such as `pci0000:00/0000:00:03.0`.
    fn device(&self, path: &str, (class, vendor): (&str, &str), node: i32) -> String {
        let folder = format!("sys/devices/{path}");
        self.write(&format!("{folder}/class"), class);
        self.write(&format!("{folder}/vendor"), vendor);
        self.write(&format!("{folder}/numa_node"), &node.to_string());
        let address = Path::new(path).file_name().unwrap().to_str().unwrap();
        self.link(&format!("sys/bus/pci/devices/{address}"), &folder);
        folder
    }

    pub(super) fn gpu(&self, path: &str, vendor: &str, driver: Option<&str>, node: i32) {
        let folder = self.device(path, ("0x030200", vendor), node);
        if let Some(driver) = driver {
            let held_by = format!("sys/bus/pci/drivers/{driver}");
            self.folder(&held_by);
            self.link(&format!("{folder}/driver"), &held_by);
        }
    }

    /// An RDMA device with one active port, an address and a device file. Gives the folder of its port.
    pub(super) fn rdma(&self, path: &str, name: &str, node: i32) -> String {
        let folder = self.device(path, ("0x020700", "0x15b3"), node);
        self.rdma_in(&folder, name)
    }

    pub(super) fn rdma_in(&self, folder: &str, name: &str) -> String {
        let own = format!("{folder}/infiniband/{name}");
        let port = format!("{own}/ports/1");
        self.write(&format!("{port}/state"), "4: ACTIVE");
        self.write(&format!("{port}/link_layer"), "InfiniBand");
        self.write(&format!("{port}/rate"), "200 Gb/sec (4X HDR)");
        self.write(&format!("{port}/gids/0"), "fe80:0000:0000:0000:0c42:a1ff:fe73:5fc6");
        self.write(&format!("{port}/gids/1"), "0000:0000:0000:0000:0000:0000:0000:0000");
        if folder.contains("pci") {
            self.link(&format!("{own}/device"), folder);
        }
        self.link(&format!("sys/class/infiniband/{name}"), &own);
        let file = format!("uverbs{}", self.device_files.fetch_add(1, Ordering::Relaxed));
        self.write(&format!("sys/class/infiniband_verbs/{file}/ibdev"), name);
        self.write(&format!("dev/infiniband/{file}"), "");
        port
    }

    /// A network interface; `virtual` and `virtio` ones have no device of their own. Gives its folder.
    pub(super) fn net(&self, path: &str, name: &str, speed: &str, node: Option<i32>) -> String {
        if let Some(node) = node {
            self.device(path, ("0x020000", "0x8086"), node);
        }
        let folder = format!("sys/devices/{path}/net/{name}");
        self.write(&format!("{folder}/type"), "1");
        self.write(&format!("{folder}/flags"), "0x1003");
        self.write(&format!("{folder}/operstate"), "up");
        self.write(&format!("{folder}/speed"), speed);
        if node.is_some() {
            self.link(&format!("{folder}/device"), &format!("sys/devices/{path}"));
        }
        self.link(&format!("sys/class/net/{name}"), &folder);
        folder
    }
}
