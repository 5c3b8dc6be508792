package pristine

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

const capSysAdmin = 21

// settingPatterns are the values in /proc/sys that belong to a namespace, so that they may be the sandbox's own.
var settingPatterns = []string{
	"fs/mqueue/*", "kernel/msg*", "kernel/sem*", "kernel/shm*", "kernel/auto_msgmni", "net/core/somaxconn", "net/unix/*",
	"net/ipv4/ip_*", "net/ipv4/tcp_*", "net/ipv4/ping_*", "net/ipv4/conf/*/*", "net/ipv4/neigh/*/*", "net/ipv6/conf/*/*", "user/*",
}

// settings are what a privileged tenant can change there; nil for others, for whom /proc/sys is read-only.
type settings map[string]string

func readSettings() settings {
	if !bounding(capSysAdmin) {
		return nil
	}
	all := settings{}
	for _, pattern := range settingPatterns {
		paths, _ := filepath.Glob("/proc/sys/" + pattern)
		for _, path := range paths {
			content, err := os.ReadFile(path)
			if err == nil { // some can only be written
				all[path] = string(content)
			}
		}
	}
	return all
}

// bounding says whether a command can ever have a capability.
func bounding(capability uint) bool {
	status, _ := os.ReadFile("/proc/self/status")
	_, rest, _ := strings.Cut(string(status), "\nCapBnd:")
	line, _, _ := strings.Cut(rest, "\n")
	set, err := strconv.ParseUint(strings.TrimSpace(line), 16, 64)
	return err != nil || set&(1<<capability) != 0
}

func (s settings) verify() error {
	now := readSettings()
	if maps.Equal(s, now) {
		return nil
	}
	for path, was := range s {
		if now[path] != was {
			return fmt.Errorf("settings: %s was changed", path)
		}
	}
	return fmt.Errorf("settings: there are others than at start")
}
