// Package pod makes sandboxes inside a container, and replaces them: its first process becomes a keeper, which gives
// each sandbox namespaces and a root of its own, over the container's root. A reset kills the sandbox with all that is
// in it and starts the next one.
//
// Guarantees:
//  1. What a sandbox writes is in memory of its own, which is freed once it has ended: before the next one serves, or
//     where it is little, at once after that. The container's own files are below, and nobody writes to them.
//  2. A sandbox is replaced only once the kernel says that no process of it is left, and the next one serves only if
//     the keeper finds its own mounts, limits and scheduling, and the folders below, as they were.
//  3. A sandbox can neither signal, trace, read nor slow the keeper: it is not in its process namespace, or has a user
//     id that no process of the sandbox can have.
//  4. Commands have fewer capabilities than those of an ordinary container, no way to gain one, and no system call
//     that makes a namespace or a mount.
//  5. What all sandboxes share cannot be written by any: the skeleton of their roots, on a file system that is read-only,
//     and a user namespace whose maps are closed.
//  6. What cannot work here is found at the start, and said with its reason.
package pod

// Methods of reset, by the name that an owner gives and that the daemon publishes.
const (
	Overlay          = "overlay"            // with a process namespace and a /proc of its own
	OverlaySharedPID = "overlay-shared-pid" // with those of the container
)

// Kind is a way to separate sandboxes from their keeper.
type Kind struct {
	Method       string `json:"method"`
	OwnUsers     bool   `json:"ownUsers"`     // a user namespace
	OwnProcesses bool   `json:"ownProcesses"` // a process namespace, with a new /proc
}

// kinds are all there are, best first. The second is for containers whose /proc is masked: there only who may mount in
// the container itself gets a new one.
var kinds = []Kind{
	{Overlay, true, true},
	{Overlay, false, true},
	{OverlaySharedPID, true, false},
}

// Order is all that a sandbox is made by.
type Order struct {
	Kind
	Stage      string `json:"stage"`      // the mount point that the daemon's program is on; sandboxes do not have it
	UpperBytes int64  `json:"upperBytes"` // what may be written
	OwnNetwork bool   `json:"ownNetwork"` // nothing but a loopback device
	Workdir    string `json:"workdir"`    // made if it is missing; "" for none
}
