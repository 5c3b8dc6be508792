package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"
)

const programMode = 0o555

// install copies this program into a folder, for an image that has nothing else in it. It is there whole or not. With a
// time it then waits that long at most until the pod's network is shut.
func install(arguments []string) error {
	if len(arguments) != 1 && len(arguments) != 2 {
		return errors.New("install: give one folder, for example `sandboxd install /agentfly`, and 5s to wait for policies")
	}
	var within time.Duration
	if len(arguments) == 2 {
		var err error
		if within, err = time.ParseDuration(arguments[1]); err != nil {
			return fmt.Errorf("install: %w: give seconds as in 5s", err)
		}
	}
	if err := copyTo(arguments[0]); err != nil {
		return err
	}
	if connect := toAPIServer(); within > 0 && connect != nil && !awaitShut(connect, within) {
		fmt.Fprintf(os.Stderr, "network: the API server answers a sandbox after %v: no NetworkPolicy is enforced, or it allows that\n", within)
	}
	return nil
}

func copyTo(folder string) error {
	source, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer source.Close()
	half, err := os.CreateTemp(folder, ".sandboxd-")
	if err != nil {
		return fmt.Errorf("install: %w: the folder must be there, on a volume that can be written", err)
	}
	defer os.Remove(half.Name())
	_, err = io.Copy(half, source)
	if err := errors.Join(err, half.Chmod(programMode), half.Close()); err != nil {
		return err
	}
	return os.Rename(half.Name(), filepath.Join(folder, "sandboxd"))
}
