package pristine

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Methods of a reset, by the name that an owner gives and that the daemon publishes.
const (
	auto     = "auto"
	overlay  = "overlay"  // commands write to an upper, which must be empty, or to scratch folders
	paths    = "paths"    // declared folders are swapped for a prepared copy
	git      = "git"      // a declared repository goes back to what it was
	command  = "command"  // the image's own command puts the declared folders back
	emptying = "scratch"  // nothing can be written but scratch folders, which are emptied
	recreate = "recreate" // never clean: the owner starts another sandbox
)

// Reset is what the owner asks for. Paths and git are absolute.
type Reset struct {
	Method         string   `json:"method"`
	Paths          []string `json:"paths"`
	Git            string   `json:"git"`
	Command        []string `json:"command"`
	TimeoutSeconds float64  `json:"timeoutSeconds"`
}

// Run runs a program of the image to its end, and then ends whatever it left running. A program that fails
// is an error with its last words.
type Run func(argv, env []string, folder, stdin string, timeout time.Duration) error

// method brings back what a tenant may change outside of scratch folders, one way or another.
type method interface {
	// restore is called when no process but the daemon is left.
	restore(timeout time.Duration) error
	// verify reads everything again if it is thorough, else what may have changed.
	verify(thorough bool) error
	// owned are the folders that it answers for, and those that it changes too, by what it adds and renames.
	owned() (folders, changed []string)
}

// choose resolves auto: an upper comes first, whatever is declared, because nothing is cheaper or surer. A sealed root
// is one that is read-only.
func (r Reset) choose(upper string, sealed bool) string {
	switch {
	case r.Method != auto && r.Method != "" && (upper == "" || r.Method == recreate):
		return r.Method
	case upper != "":
		return overlay
	case len(r.Paths) > 0:
		return paths
	case r.Git != "":
		return git
	case len(r.Command) > 0:
		return command
	case sealed:
		return emptying
	}
	return recreate
}

// prepare makes a method ready, and with that proves that it works here; its error names the field.
func (r Reset) prepare(upper string, sealed bool, scratch []string, run Run) (name string, m method, err error) {
	name = r.choose(upper, sealed)
	if !slices.Contains([]string{overlay, emptying, recreate}, name) && r.TimeoutSeconds <= 0 {
		return name, nil, fmt.Errorf("reset.timeoutSeconds: %v is not above 0", r.TimeoutSeconds)
	}
	switch name {
	case overlay:
		if upper == "" {
			return name, nil, errors.New("reset.method: overlay needs a root whose changes go to an upper folder, and there is none: use paths, git, command or recreate")
		}
		return name, nil, nil
	case emptying:
		if !sealed {
			return name, nil, errors.New("reset.method: scratch needs a root that is read-only: mount it so, or use paths, git, command or recreate")
		}
		m = nothing{}
	case recreate:
		return name, nil, nil
	case paths:
		m, err = newSwaps(r.Paths, scratch)
	case git:
		m, err = newRepository(r.Git, scratch, run)
	case command:
		m, err = newProgram(r.Command, r.Paths, scratch, run, seconds(r.TimeoutSeconds))
	default:
		return name, nil, fmt.Errorf("reset.method: %q is not one of auto, overlay, paths, git, command, scratch, recreate", r.Method)
	}
	return name, m, err
}

// nothing is the method where nothing is to be brought back.
type nothing struct{}

func (nothing) restore(time.Duration) error        { return nil }
func (nothing) verify(bool) error                  { return nil }
func (nothing) owned() (folders, changed []string) { return nil, nil }

func seconds(n float64) time.Duration { return time.Duration(n * float64(time.Second)) }

// declared checks a folder that an owner declared, and returns the folders on the way to it.
func declared(field, path string, others []string) (ancestors, error) {
	if !filepath.IsAbs(path) || filepath.Clean(path) != path || path == "/" {
		return nil, fmt.Errorf("%s: %q is not an absolute path below /, without . or ..", field, path)
	}
	for _, other := range others {
		if inside(path, other) || inside(other, path) {
			return nil, fmt.Errorf("%s: %q and %q overlap, which is declared or emptied too: declare one of them", field, path, other)
		}
	}
	way, err := readAncestors(path + "/.") // the folder itself must be one
	if err != nil {
		return nil, fmt.Errorf("%s: %w: declare an existing folder by its real path", field, err)
	}
	delete(way, path)
	mounts, err := mountPoints()
	if err != nil {
		return nil, err
	}
	for _, mount := range mounts {
		if inside(mount, path) {
			return nil, fmt.Errorf("%s: %q has the mount %q in it, which cannot be moved: mount the volume one folder up and declare a folder in it", field, path, mount)
		}
	}
	return way, nil
}

// inside says that path is folder or lies in it.
func inside(path, folder string) bool {
	return path == folder || strings.HasPrefix(path, strings.TrimSuffix(folder, "/")+"/")
}

// program is the method of the image's own command.
type program struct {
	argv  []string
	run   Run
	trees []*tree
}

// tree is one declared folder that stays in its place.
type tree struct {
	path    string
	way     ancestors
	want    fingerprint
	known   proofs
	trusted bool // an unchanged change time proves that the content is unchanged
}

func newTree(field, path string, others []string) (*tree, error) {
	way, err := declared(field, path, others)
	if err != nil {
		return nil, err
	}
	t := &tree{path: path, way: way}
	if t.want, t.known, err = takeFingerprint(path); err != nil {
		return nil, fmt.Errorf("%s: %w: everything in a declared folder must be readable", field, err)
	}
	if t.trusted, err = recordsStores(path); err == nil {
		err = setTimes(path, t.want["."].accessed, t.want["."].modified)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w: the folder must be writable, and the daemon's own", field, err)
	}
	return t, nil
}

func (t *tree) verify(thorough bool) error {
	if err := t.way.verify(t.path); err != nil {
		return err
	}
	return t.want.check(t.path, t.known, t.trusted && !thorough)
}

func newProgram(argv, folders, scratch []string, run Run, timeout time.Duration) (*program, error) {
	if len(argv) == 0 {
		return nil, errors.New("reset.command: is empty: give the program that puts the sandbox back, and its arguments")
	}
	p := &program{argv: argv, run: run}
	for i, path := range folders {
		t, err := newTree("reset.paths", path, slices.Concat(scratch, folders[:i]))
		if err != nil {
			return nil, err
		}
		p.trees = append(p.trees, t)
	}
	err := p.restore(timeout)
	if err == nil {
		err = p.verify(false)
	}
	if err != nil {
		return nil, fmt.Errorf("reset.command: run in the fresh sandbox: %w: it must exit 0 and leave declared folders as they are", err)
	}
	return p, nil
}

func (p *program) owned() (folders, changed []string) {
	for _, t := range p.trees {
		folders = append(folders, t.path)
	}
	return folders, nil
}

func (p *program) restore(timeout time.Duration) error {
	return p.run(p.argv, nil, "/", "", timeout)
}

func (p *program) verify(thorough bool) error {
	for _, t := range p.trees {
		if err := t.verify(thorough); err != nil {
			return err
		}
	}
	return nil
}
