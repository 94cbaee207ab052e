//! Machines made of files, and a driver that lies.

mod liar;
mod tree;

use millpond_core::topology::{Filter, Matrix, Medium, Nearness, PciAddress, Place, Row, Scope, Unfit, Why};

use self::tree::{AMD, NVIDIA, Tree};
use super::{Machine, Roots, link_events};

/// The names in the line of `place`: preferred, available.
fn line(machine: &Machine, scope: Scope, place: &str) -> (Vec<String>, Vec<String>) {
    let inventory = machine.inventory();
    let matrix = Matrix::discover(&inventory, scope, vec![Row::EMPTY; machine.rows()]).unwrap();
    let row = matrix.row(&place.parse().unwrap()).unwrap();
    let names = |nics: &[u8]| nics.iter().map(|nic| inventory.nics[usize::from(*nic)].name.to_string()).collect();
    (names(row.preferred()), names(row.available()))
}

fn why(machine: &Machine, scope: Scope, place: &str, nic: &str) -> Why {
    let inventory = machine.inventory();
    let matrix = Matrix::discover(&inventory, scope, vec![Row::EMPTY; machine.rows()]).unwrap();
    let row = matrix.row(&place.parse().unwrap()).unwrap();
    matrix.why(&inventory, row, inventory.nic(nic).unwrap())
}

/// Two sockets with two PCIe switches each; behind each switch two GPUs and one NIC.
fn switches() -> Tree {
    let tree = Tree::new(2);
    for (node, buses) in [(0, [0x10, 0x30]), (1, [0x80, 0xa0])] {
        for bus in buses {
            let up = format!("pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{:02x}:00.0", bus + 1);
            let port =
                |at: u8| format!("{up}/0000:{:02x}:{at:02x}.0/0000:{:02x}:00.0", bus + 2, bus + 3 + i32::from(at));
            tree.gpu(&port(0), NVIDIA, Some("nvidia"), node);
            tree.gpu(&port(1), NVIDIA, Some("nvidia"), node);
            tree.rdma(&port(2), &format!("mlx5_{:x}", bus >> 4), node);
        }
    }
    tree
}

#[test]
fn behind_pcie_switches_each_gpu_prefers_the_nic_of_its_own_switch() {
    let tree = switches();
    let machine = tree.read();
    assert_eq!(machine.notes, Vec::<String>::new());
    assert_eq!((machine.nics.len(), machine.gpus.len(), machine.spots.len()), (4, 8, 10));
    for (gpu, nic) in [(0, "mlx5_1"), (1, "mlx5_1"), (2, "mlx5_3"), (3, "mlx5_3"), (4, "mlx5_8"), (7, "mlx5_a")] {
        let place = format!("cuda:{gpu}");
        let (preferred, available) = line(&machine, Scope::Rdma, &place);
        assert_eq!((preferred, available.len()), (vec![nic.to_owned()], 3), "{place}");
        let Why::Nearest(distance) = why(&machine, Scope::Rdma, &place, nic) else { panic!("{place}") };
        assert_eq!(distance.nearness, Nearness::Switch);
    }
    // The fallbacks are in order: the other switch of the socket before the other socket.
    assert_eq!(line(&machine, Scope::Rdma, "cuda:0").1, ["mlx5_3", "mlx5_8", "mlx5_a"]);
    assert_eq!(line(&machine, Scope::Rdma, "cpu:1").0, ["mlx5_8", "mlx5_a"]);
    let Why::Farther { distance, best } = why(&machine, Scope::Rdma, "cuda:0", "mlx5_8") else { panic!("near?") };
    assert_eq!((distance.nearness, best), (Nearness::System, Nearness::Switch));
}

#[test]
fn a_flat_virtual_machine_without_numa_nodes_prefers_all_nics() {
    for nodes in [0, 1, 2] {
        let tree = Tree::new(nodes);
        tree.rdma("pci0000:00/0000:00:03.0", "mlx5_0", -1);
        tree.rdma("pci0000:00/0000:00:04.0", "mlx5_1", -1);
        tree.gpu("pci0000:00/0000:00:05.0", NVIDIA, Some("nvidia"), -1);
        let machine = tree.read();
        for place in ["cpu:0", "cuda:0", "*"] {
            let (preferred, available) = line(&machine, Scope::Rdma, place);
            assert_eq!((preferred.len(), available.len()), (2, 0), "{place} with {nodes} nodes");
        }
        // With one node everything is on it, whatever the firmware forgot to say; with two nobody knows.
        let Why::Nearest(distance) = why(&machine, Scope::Rdma, "cpu:0", "mlx5_0") else { panic!("not preferred") };
        assert_eq!(distance.nearness, if nodes == 1 { Nearness::Node } else { Nearness::Unknown });
    }
}

#[test]
fn with_more_nics_than_gpus_the_near_ones_are_preferred_and_every_other_has_a_reason() {
    let tree = Tree::new(2);
    let switch = "pci0000:10/0000:10:01.0/0000:11:00.0";
    tree.gpu(&format!("{switch}/0000:12:00.0/0000:13:00.0"), AMD, Some("amdgpu"), 0);
    tree.rdma(&format!("{switch}/0000:12:01.0/0000:14:00.0"), "mlx5_0", 0);
    tree.rdma(&format!("{switch}/0000:12:02.0/0000:15:00.0"), "mlx5_1", 0);
    tree.rdma("pci0000:30/0000:30:01.0/0000:31:00.0", "mlx5_2", 0);
    let down = tree.rdma("pci0000:80/0000:80:01.0/0000:81:00.0", "mlx5_10", 1);
    tree.write(&format!("{down}/state"), "1: DOWN");
    let machine = tree.read();
    let (preferred, available) = line(&machine, Scope::Rdma, "hip:0");
    assert_eq!((preferred, available), (vec!["mlx5_0".into(), "mlx5_1".into()], vec!["mlx5_2".into()]));
    let reasons = ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_10"].map(|nic| why(&machine, Scope::Rdma, "hip:0", nic));
    assert_eq!(reasons.map(|why| why.verdict()), ["preferred", "preferred", "fallback", "unused"]);
    assert!(reasons[3].to_string().contains("none of its ports is active"));
}

#[test]
fn every_way_of_being_unfit_is_told_apart() {
    let tree = Tree::new(1);
    let bus = |at: u8| format!("pci0000:00/0000:00:{at:02x}.0");
    let port = tree.rdma(&bus(3), "no_link", 0);
    tree.write(&format!("{port}/state"), "1: DOWN");
    let port = tree.rdma(&bus(4), "no_gid", 0);
    tree.write(&format!("{port}/gids/0"), "0000:0000:0000:0000:0000:0000:0000:0000");
    tree.rdma(&bus(5), "no_file", 0);
    tree.remove("dev/infiniband/uverbs2");
    tree.rdma(&bus(6), "good", 0);
    let lo = tree.net("virtual", "lo", "", None);
    tree.write(&format!("{lo}/type"), "772");
    let down = tree.net(&bus(7), "eth0", "-1", Some(0));
    tree.write(&format!("{down}/flags"), "0x1002");
    let unplugged = tree.net(&bus(8), "eth1", "-1", Some(0));
    tree.write(&format!("{unplugged}/operstate"), "down");
    tree.net(&bus(9), "eth2", "25000", Some(0));
    tree.net("virtual", "eth10", "", None);
    tree.write("sys/class/net/bonding_masters", "");
    let machine = tree.read();
    let found: Vec<(String, Option<Unfit>)> =
        machine.nics.iter().map(|nic| (nic.name.to_string(), nic.unfit)).collect();
    let expected = [
        ("good", None),
        ("no_file", Some(Unfit::NoDeviceFile)),
        ("no_gid", Some(Unfit::NoGid)),
        ("no_link", Some(Unfit::NoActivePort)),
        ("eth0", Some(Unfit::Down)),
        ("eth1", Some(Unfit::Down)),
        ("eth2", None),
        ("eth10", None),
        ("lo", Some(Unfit::Loopback)),
    ];
    assert_eq!(found, expected.map(|(name, unfit)| (name.to_owned(), unfit)));
    let good = machine.nics[0];
    assert_eq!((good.medium, good.mbps), (Medium::InfiniBand, 200_000));
    assert_eq!(machine.nics[6].mbps, 25_000);
    assert_eq!(line(&machine, Scope::Net, "cpu:0").0, ["eth2", "eth10"]);
    assert_eq!(line(&machine, Scope::Rdma, "cpu:0").0, ["good"]);
}

#[test]
fn a_soft_roce_device_sits_where_its_interface_does() {
    let tree = Tree::new(2);
    tree.net("pci0000:80/0000:80:02.0", "eth0", "10000", Some(1));
    let port = tree.rdma_in("sys/devices/virtual", "rxe0");
    tree.write(&format!("{port}/link_layer"), "Ethernet");
    tree.write("sys/class/infiniband/rxe0/parent", "eth0");
    let machine = tree.read();
    let rxe = machine.nics[0];
    assert_eq!((rxe.medium, rxe.unfit, rxe.at), (Medium::Roce, None, machine.nics[1].at));
    assert_eq!(rxe.twin.unwrap().as_str(), "eth0");
    assert_eq!(line(&machine, Scope::Rdma, "cpu:1").0, ["rxe0"]);
}

#[test]
fn only_gpus_that_their_vendors_driver_holds_are_counted_by_address() {
    let tree = Tree::new(1);
    tree.gpu("pci0000:00/0000:00:0a.0", NVIDIA, Some("nvidia"), 0);
    tree.gpu("pci0000:00/0000:00:05.0", NVIDIA, Some("vfio-pci"), 0);
    tree.gpu("pci0000:00/0000:00:06.0", NVIDIA, None, 0);
    tree.gpu("pci0000:00/0000:00:07.0", NVIDIA, Some("nvidia"), 0);
    tree.gpu("pci0000:00/0000:00:08.0", AMD, Some("amdgpu"), 0);
    tree.gpu("pci0000:00/0000:00:02.0", "0x1a03", Some("ast"), 0); // the screen of a remote console
    let machine = tree.read();
    let gpus: Vec<(String, PciAddress)> = machine.gpus.iter().map(|gpu| (gpu.place.to_string(), gpu.pci)).collect();
    let expected = [("cuda:0", "0000:00:07.0"), ("hip:0", "0000:00:08.0"), ("cuda:1", "0000:00:0a.0")];
    assert_eq!(gpus, expected.map(|(place, pci)| (place.to_owned(), pci.parse().unwrap())));
    assert_eq!(machine.notes.len(), 2, "{:?}", machine.notes);
    assert!(machine.notes[0].contains("0000:00:05.0 is not used: its driver nvidia does not hold it"));
}

#[test]
fn an_interface_that_goes_down_and_comes_back_is_two_link_events() {
    let tree = Tree::new(1);
    let eth0 = tree.net("pci0000:00/0000:00:03.0", "eth0", "1000", Some(0));
    tree.net("pci0000:00/0000:00:04.0", "eth1", "1000", Some(0));
    let first = tree.read();
    tree.write(&format!("{eth0}/operstate"), "down");
    let second = tree.read();
    tree.write(&format!("{eth0}/operstate"), "up");
    tree.write(&format!("{eth0}/speed"), "100");
    tree.net("pci0000:00/0000:00:05.0", "eth2", "1000", Some(0));
    let third = tree.read();
    let events = |before: &Machine, after: &Machine| {
        let events = link_events(&before.nics, &after.nics);
        events.map(|event| format!("{}: {}", event.nic, event.what)).collect::<Vec<_>>()
    };
    assert_eq!(events(&first, &second), ["eth0: it is down; `ip link` shows why"]);
    assert_eq!(events(&second, &third), ["eth0: it is fit again", "eth2: it is new"]);
    assert_eq!(events(&first, &third), ["eth0: its speed is 100 Mb/s instead of 1000", "eth2: it is new"]);
    assert_eq!(events(&third, &second)[1], "eth2: it is gone");
}

#[test]
fn what_an_operator_denies_is_not_in_the_matrix() {
    let tree = switches();
    let mut machine = tree.read();
    Filter { allow: &[], deny: &["mlx5_1"] }.apply(&mut machine.nics).unwrap();
    let (preferred, available) = line(&machine, Scope::Rdma, "cuda:0");
    assert_eq!((preferred, available.len()), (vec!["mlx5_3".to_owned()], 2));
    assert_eq!(why(&machine, Scope::Rdma, "cuda:0", "mlx5_1"), Why::Unfit(Unfit::Denied));
}

#[test]
fn this_machine_is_read_without_complaint() {
    let machine = Machine::read(&Roots::default());
    assert!(machine.spots.iter().any(|spot| spot.place == Place::cpu(0)), "{machine:?}");
    for nic in machine.nics.iter().filter(|nic| nic.name.as_str() == "lo") {
        assert_eq!(nic.unfit, Some(Unfit::Loopback));
    }
}
