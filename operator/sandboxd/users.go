package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"agentfly.dev/sandboxd/proc"
)

const (
	capSetgid      = 6
	capSetuid      = 7
	maxUserFile    = 1 << 20 // a tenant writes these files
	maxUserGroups  = 64
	passwdFields   = 7
	groupFields    = 4
	unmappedNumber = 1<<32 - 1 // means "none" to the kernel
)

// users turns names of the sandbox's own files into numbers.
type users struct {
	refusal        string // why no command can run as another user; "" where one can
	passwd, groups string // paths
}

// account is one user, found.
type account struct {
	proc.User
	name, home string // "" if it has no line in passwd
}

// env is what a login would set.
func (a account) env() map[string]string {
	if a.name == "" {
		return nil
	}
	return map[string]string{"HOME": a.home, "USER": a.name, "LOGNAME": a.name}
}

// openUsers finds out whether this process may become another user.
func openUsers() users {
	return users{refusal: whyOneUser("/proc/self/uid_map", "/proc/self/status"), passwd: "/etc/passwd", groups: "/etc/group"}
}

func whyOneUser(uidMap, status string) string {
	mapped, err := os.ReadFile(uidMap)
	if err != nil {
		return err.Error()
	}
	numbers := 0
	for line := range strings.Lines(string(mapped)) {
		if columns := strings.Fields(line); len(columns) == 3 {
			count, _ := strconv.Atoi(columns[2])
			numbers += count
		}
	}
	if numbers < 2 {
		return "this sandbox has a single user id"
	}
	content, err := os.ReadFile(status)
	if err != nil {
		return err.Error()
	}
	for line := range strings.Lines(string(content)) {
		if value, found := strings.CutPrefix(line, "CapEff:"); found {
			set, _ := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
			if needed := uint64(1<<capSetuid | 1<<capSetgid); set&needed == needed {
				return ""
			}
		}
	}
	return "the sandbox's first process lacks CAP_SETUID or CAP_SETGID"
}

// find resolves "name", "uid" or "uid:gid". A uid without a line in passwd needs its gid.
func (u users) find(given string) (account, error) {
	if u.refusal != "" {
		return account{}, badRequest("user: " + strconv.Quote(given) + " is refused: " + u.refusal + "; leave user out")
	}
	name, group, hasGroup := strings.Cut(given, ":")
	uid, err := userNumber(name)
	isNumber := err == nil
	if hasGroup && !isNumber {
		return account{}, badRequest("user: " + strconv.Quote(given) + " is neither name, uid nor uid:gid")
	}
	found, err := u.account(func(line []string) bool {
		return line[0] == name || (isNumber && line[2] == strconv.FormatUint(uint64(uid), 10))
	})
	switch {
	case errors.Is(err, os.ErrNotExist) && isNumber && hasGroup:
		found = account{User: proc.User{UID: uid}}
	case errors.Is(err, os.ErrNotExist):
		return account{}, badRequest("user: " + strconv.Quote(given) + " has no line in " + u.passwd + "; give uid:gid")
	case err != nil:
		return account{}, err
	}
	if hasGroup {
		if found.GID, err = userNumber(group); err != nil {
			return account{}, badRequest("user: " + strconv.Quote(given) + ": " + err.Error())
		}
		return found, nil
	}
	found.Groups, err = u.groupsOf(found)
	return found, err
}

func (u users) account(is func([]string) bool) (account, error) {
	found := account{}
	err := eachLine(u.passwd, passwdFields, func(line []string) (bool, error) {
		if !is(line) {
			return false, nil
		}
		uid, err := userNumber(line[2])
		if err == nil {
			found.UID = uid
			found.GID, err = userNumber(line[3])
		}
		found.name, found.home = line[0], line[5]
		return true, err
	})
	if err == nil && found.name == "" {
		return found, os.ErrNotExist
	}
	return found, err
}

func (u users) groupsOf(of account) ([]uint32, error) {
	found := []uint32{of.GID}
	err := eachLine(u.groups, groupFields, func(line []string) (bool, error) {
		if !slices.Contains(strings.Split(line[3], ","), of.name) {
			return false, nil
		}
		gid, err := userNumber(line[2])
		if err == nil && !slices.Contains(found, gid) {
			found = append(found, gid)
		}
		return len(found) == maxUserGroups, err
	})
	if errors.Is(err, os.ErrNotExist) {
		err = nil // an image need not have groups
	}
	return found, err
}

// eachLine calls until it returns true. The file is a tenant's: of any kind and any size.
func eachLine(path string, fields int, call func([]string) (bool, error)) error {
	file, _, err := openRegular(path, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	lines := bufio.NewScanner(io.LimitReader(file, maxUserFile))
	for lines.Scan() {
		line := strings.Split(lines.Text(), ":")
		if len(line) != fields {
			continue
		}
		if done, err := call(line); done || err != nil {
			if err != nil {
				return badRequest("user: " + path + ": " + strconv.Quote(lines.Text()) + ": " + err.Error())
			}
			return nil
		}
	}
	return lines.Err()
}

func userNumber(given string) (uint32, error) {
	number, err := strconv.ParseUint(given, 10, 32)
	if err != nil || number == unmappedNumber {
		return 0, fmt.Errorf("%q is not a number of a user or group", given)
	}
	return uint32(number), nil
}
