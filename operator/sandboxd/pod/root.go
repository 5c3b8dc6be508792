package pod

import (
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// The stage: a file system in memory on the mount point that the daemon's program is on. It has the skeleton, the
// plan of the rest, and two folders to mount on.
const (
	skeletonFolder = "/skeleton"
	planFile       = "/plan"
	rootFolder     = "/root"
	upperFolder    = "/upper"
)

// plan is what a root has besides the skeleton, in the order of its mounts.
type plan struct {
	Overlays []string `json:"overlays"` // folders of the container
	Again    []string `json:"again"`    // its files that are mounted, and are too large to be copied
}

// layRoot mounts a root on a skeleton, whose changes go to memory of its own.
func layRoot(o Order) (root string, err error) {
	var p plan
	content, err := os.ReadFile(o.Stage + planFile)
	if err != nil {
		return "", err
	}
	if err := json.Unmarshal(content, &p); err != nil {
		return "", fmt.Errorf("plan: %w", err)
	}
	options := "mode=0755"
	if o.UpperBytes > 0 {
		options += ",size=" + strconv.FormatInt(o.UpperBytes, 10)
	}
	if err := mount("agentfly", o.Stage+upperFolder, "tmpfs", 0, options); err != nil {
		return "", err
	}
	root = o.Stage + rootFolder
	if err := overlay(o.Stage, 0, o.Stage+skeletonFolder, root); err != nil {
		return "", err
	}
	for i, folder := range p.Overlays {
		if err := overlay(o.Stage, i+1, folder, root+folder); err != nil {
			return "", err
		}
	}
	for _, file := range p.Again {
		if err := mountAgain(file, root+file, 0); err != nil {
			return "", err
		}
		if err := readOnly(root+file, false); err != nil {
			return "", err
		}
	}
	if err := makeDevices(root); err != nil {
		return "", err
	}
	if err := mountAgain("/sys", root+"/sys", syscall.MS_REC); err != nil {
		return "", err
	}
	if err := readOnly(root+"/sys", true); err != nil {
		return "", err
	}
	if !o.OwnProcesses {
		if err := mountAgain("/proc", root+"/proc", syscall.MS_REC); err != nil {
			return "", err
		}
	}
	if o.Workdir != "" {
		if err := makeFolders(root, o.Workdir); err != nil {
			return "", err
		}
	}
	return root, nil
}

// overlay mounts the one with a number: nobody else has its folders.
func overlay(stage string, number int, lower, place string) error {
	upper := fmt.Sprintf("%s%s/%d", stage, upperFolder, number)
	work := upper + "w"
	for _, folder := range []string{upper, work} {
		if err := os.Mkdir(folder, 0o755); err != nil {
			return err
		}
	}
	var st syscall.Stat_t
	if err := syscall.Lstat(lower, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: lower, Err: err}
	}
	if err := dress(lower, upper, &st); err != nil { // which the overlay's own folder shows
		return err
	}
	return mount("overlay", place, "overlay", 0,
		"lowerdir="+escaped.Replace(lower)+",upperdir="+escaped.Replace(upper)+",workdir="+escaped.Replace(work)+",userxattr")
}

// escaped is for options of an overlay: a colon separates folders there, a comma options.
var escaped = strings.NewReplacer(`\`, `\\`, ":", `\:`, ",", `\,`)

// enterRoot makes a folder the root, and lets go of the old one.
func enterRoot(root string) error {
	if err := os.Chdir(root); err != nil {
		return err
	}
	err := syscall.PivotRoot(".", ".")
	if err == nil {
		if err := syscall.Unmount(".", syscall.MNT_DETACH); err != nil {
			return fmt.Errorf("umount: the old root: %w", err)
		}
		return os.Chdir("/")
	}
	// A container's own filter may refuse it also to who may mount: then the new root hides the old one.
	if moved := mount(".", "/", "", syscall.MS_MOVE, ""); moved != nil {
		return fmt.Errorf("pivot_root: %w; %w", err, moved)
	}
	if err := syscall.Chroot("."); err != nil {
		return fmt.Errorf("chroot: %w", err)
	}
	return os.Chdir("/")
}

func mount(source, target, kind string, flags uintptr, options string) error {
	if err := syscall.Mount(source, target, kind, flags, options); err != nil {
		return fmt.Errorf("mount: %s %s on %s: %w", kind, source, target, err)
	}
	return nil
}

func mountAgain(source, target string, flags uintptr) error {
	return mount(source, target, "", syscall.MS_BIND|flags, "")
}

func mountPoints() ([]string, error) {
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var places []string
	for line := range strings.Lines(string(table)) {
		if fields := strings.Fields(line); len(fields) > 4 {
			places = append(places, unescape(fields[4]))
		}
	}
	return places, nil
}

// unescape reads a path as the kernel writes it: with \ and three octal digits for what would break a line.
func unescape(path string) string {
	for _, code := range []string{" ", "\t", "\n", `\`} {
		path = strings.ReplaceAll(path, fmt.Sprintf(`\%03o`, code[0]), code)
	}
	return path
}
